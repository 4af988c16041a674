"""While a cell runs on some ranks only, nothing may wait for the others: they will never come."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from nbtrain.errors import NotSupported
from nbtrain.intercept import COLLECTIVES, Listeners


@contextmanager
def only(ranks: Sequence[int], world_size: int) -> Iterator[None]:
    """Refuse what needs every rank, unless all of them run the cell. Groups of the user's own are his business."""
    if len(ranks) == world_size:
        yield
        return
    listeners = Listeners()
    try:
        for name in COLLECTIVES:
            listeners.listen(f"torch.distributed.{name}", "subset", _refusing(name, ranks))
        yield
    finally:
        listeners.close()


def _refusing(name: str, ranks: Sequence[int]) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        parameters = list(inspect.signature(old).parameters)
        at = parameters.index("group") if "group" in parameters else len(parameters)

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = args[at] if len(args) > at else kwargs.get("group")
            if group is not None and group is not dist.group.WORLD:
                return old(*args, **kwargs)
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            raise NotSupported(
                f"{name} needs every rank, and this cell runs on {where} only: it would wait for ever. Training, "
                "reduce, gather and barrier belong into a %%distributed cell"
            )

        return collective

    return make
