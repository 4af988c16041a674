"""While a cell runs on some ranks only, nothing may wait for the others: they will never come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from nbtrain.errors import NotSupported
from nbtrain.patches import Patches

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "all_gather_single",
    "reduce_scatter_single",
)  # fmt: skip


@contextmanager
def only(ranks: Sequence[int], world_size: int) -> Iterator[None]:
    """Refuse what needs every rank, unless all of them run the cell. Groups of the user's own are his business."""
    if len(ranks) == world_size:
        yield
        return
    patches = Patches()
    try:
        for name in [name for name in COLLECTIVES if hasattr(dist, name)]:
            patches.wrap(dist, name, _refusing(name, ranks))
        yield
    finally:
        patches.undo()


def _refusing(name: str, ranks: Sequence[int]) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        def collective(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            if group is not None and group is not dist.group.WORLD:
                return old(*args, group=group, **kwargs)
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            raise NotSupported(
                f"{name} needs every rank, and this cell runs on {where} only: it would wait for ever. Training, "
                "reduce, gather and barrier belong into a %%distributed cell"
            )

        return collective

    return make
