"""`torch.save` on several ranks: one file, written once, and never half of it there. What is in pieces is saved whole.
`save_pretrained` of Hugging Face's models, too.

The loop's own line, `torch.save(model.state_dict(), "model.pt")`, is met by every rank. Rank 0 writes; another rank
that comes to the same file waits until rank 0 has written it, and leaves it at that. It writes by itself what rank 0
does not: a file under another name, or below `if rank == 1`, is known for that once rank 0 has gone on to a collective
or to the end of the cell. What is in pieces is met by all ranks: each path that they name is written by the first of
those that name it.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.base.awake_time import AwakeTimeout
from nbtrain.base.errors import NotSupported
from nbtrain.compat import training_libraries
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.kit.collective_calls import MEETING
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.ranks.collective_guard import CollectiveGuard

PIECES = (
    "saving a model in pieces needs every rank: write it outside of `if rank == 0:`; the file is written once, "
    "with whole weights"
)
PATIENCE = 10.0
"""Seconds after which a rank writes a file by itself: two at a time do no harm, they are moved into place whole."""


class TorchSave(Part):
    """Listens to a rank's calls of `torch.save` in a cell."""

    def __init__(self, collective_guard: CollectiveGuard, several: bool) -> None:
        """`several`: whether there are other ranks."""
        self.collective_guard = collective_guard
        self._several = several
        self.calls: Counter[int] = Counter()
        self.off = False
        """nothing is written: the cell is only tried"""

    def begin(self, cell: Cell) -> None:
        self.calls.clear()
        self.off = cell.trial is not None

    def listen(self, listeners: Listeners) -> None:
        listeners.listen("torch.save", "saving", self._saving)
        for path in training_libraries.SAVE_PRETRAINED:
            module = path.rpartition(".")[0].rpartition(".")[0]
            listeners.when_imported(module, [path], "saving", lambda _: self._pretrained)

    def _saving(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if self.off and isinstance(f, (str, os.PathLike)):
                return
            if not self._several or not self.collective_guard.open:
                return old(obj, f, *args, **kwargs)
            from nbtrain.strategies.kit.stage_tensors import with_full_stage_tensors

            if not isinstance(f, (str, os.PathLike)):  # an open file, or memory: each rank has its own
                return old(self._of_each(with_full_stage_tensors(obj)), f, *args, **kwargs)
            path = os.path.realpath(os.fspath(f))
            if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a directory
                return old(obj, f, *args, **kwargs)
            self._once(path, with_full_stage_tensors(obj), lambda whole: _whole(old, whole, path, *args, **kwargs))

        return save

    def _pretrained(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """`model.save_pretrained(folder)`: of transformers, peft and what is built like them."""

        def save_pretrained(model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            if self.off:
                return None
            if not self._several or not self.collective_guard.open:
                return old(model, save_directory, *args, **kwargs)
            from nbtrain.strategies.kit.stage_tensors import with_full_stage_tensors

            given = kwargs.pop("state_dict", None)
            weights = with_full_stage_tensors(model.state_dict() if given is None else given)

            def write(whole: Any) -> None:
                old(model, save_directory, *args, state_dict=_tied(model, whole) if given is None else whole, **kwargs)

            # However long it takes: a second one would write into the same files.
            return self._once(os.path.realpath(os.fspath(save_directory)), weights, write, patience=math.inf)

        return save_pretrained

    def _once(self, path: str, obj: Any, write: Callable[[Any], None], patience: float = PATIENCE) -> None:
        key = int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest(), "little") >> 1
        self.calls[key] += 1
        from nbtrain.strategies.kit.saved_pieces import holds_shards

        if holds_shards(obj):
            self._save_pieces(obj, path, key, write)
        elif self.collective_guard.rank == 0:
            write(obj)
            self.collective_guard.wrote(key, self.calls[key])
        elif not self._written(key, patience):
            write(obj)

    def _of_each(self, obj: Any) -> Any:
        """With whole weights, for a file that every rank writes by itself."""
        from nbtrain.strategies.kit.saved_pieces import holds_shards, with_full_tensors

        if not holds_shards(obj):
            return obj
        self._paths(0)
        return with_full_tensors(obj)

    def _save_pieces(self, obj: Any, path: str, key: int, write: Callable[[Any], None]) -> None:
        """All ranks have to come here. Of those that name one path the first writes it."""
        from nbtrain.strategies.kit.saved_pieces import with_full_tensors

        rank, paths = self.collective_guard.rank, self._paths(key)
        for writer in sorted({paths.index(one) for one in paths}):
            whole = with_full_tensors(obj, writer)
            if rank == writer:
                write(whole)
                self.collective_guard.wrote(key, self.calls[key])
        if paths[rank] == paths[0]:
            self._written(key)
        if len(set(paths)) > 1:
            dist.barrier()  # whoever reads its file now finds it

    def _paths(self, key: int) -> list[int]:
        """The path that each rank names, by its digest."""
        try:
            # Not a barrier, which others may be waiting in: `if rank == 0: torch.save(...)`, and then `barrier()`.
            where = "cpu" if dist.get_backend() == "gloo" else "cuda"
            dist.all_reduce(torch.zeros(MEETING, device=where))
        except NotSupported as error:
            raise NotSupported(f"{PIECES}. {error}") from None
        paths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=where)
        paths[self.collective_guard.rank] = key
        dist.all_reduce(paths)
        return [int(number) for number in paths.tolist()]

    def _written(self, key: int, seconds: float = PATIENCE) -> bool:
        """Wait for rank 0, and return whether it has written this file."""
        patience = AwakeTimeout(seconds)
        while True:
            past = self.collective_guard.past_us() or patience.over  # asked first: it may write in between
            if self.collective_guard.has_written(key, self.calls[key]):
                return True
            if past:
                return False
            time.sleep(0.001)


def _tied(model: nn.Module, weights: Any) -> Any:
    """Weights that are one in the model are one in what is written."""
    first: dict[int, Any] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in weights:
            weights[name] = first.setdefault(id(p), weights[name])
    return weights


def _whole(old: Callable[..., Any], obj: Any, path: str, *args: Any, **kwargs: Any) -> None:
    from nbtrain.base.atomic_write import replacing
    from nbtrain.worker.checkpoints.folder import telling_of_a_full_disk

    with replacing(path) as beside, telling_of_a_full_disk(path):
        old(obj, beside, *args, **kwargs)
