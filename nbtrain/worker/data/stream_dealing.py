"""Deals out the batches of iterable data sets, which have no order that could be dealt out before.

Every rank iterates the whole stream, with the random numbers of one process, and keeps its own batches: the first of
each round on rank 0, the second on rank 1. So each sample is seen once, a step sees the batches that it sees of other
data, and no data set has to know of ranks. Who splits a stream by rank already is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nbtrain.compat import training_libraries
from nbtrain.worker.batches import can_be_cut, can_be_joined, joined, rows_of, samples_in
from nbtrain.worker.data.batch_dealing import shared_out
from nbtrain.worker.data.split_datasets import closure_values
from nbtrain.worker.parts import Deal

SPLITS = frozenset(
    {
        "rank", "world_size", "local_rank", "global_rank", "num_replicas", "get_rank", "get_world_size", "RANK",
        "WORLD_SIZE", "process_index", "num_processes", "split_by_node", "split_dataset_by_node", "node_splitter",
    }
)  # fmt: skip
"""names in the code of a data set that splits by rank"""
COUNTS = ("num_replicas", "world_size", "num_processes", "nodes")
"""of ranks, in an object that splits by them"""


def dealt_as_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset) and not splits_by_rank(loader)


def splits_by_rank(loader: DataLoader[Any]) -> bool:
    """Whether it, or what it is made of, looks which rank it is on."""
    pipe = getattr(torch.utils.data, "IterDataPipe", None)  # torch itself splits one that asks for it; it is deprecated
    if (pipe is not None and isinstance(loader.dataset, pipe)) or shared_out(loader):
        return True
    return _splits(loader.dataset, 3, set())


def _splits(obj: Any, depth: int, seen: set[int]) -> bool:
    if depth < 0 or id(obj) in seen or isinstance(obj, str | bytes | int | float | torch.Tensor):
        return False
    seen.add(id(obj))
    if isinstance(obj, FunctionType):
        values = closure_values(obj)
        return bool(SPLITS & _names(obj.__code__)) or any(_splits(value, depth - 1, seen) for value in values)
    if isinstance(obj, list | tuple):
        return any(_splits(item, depth - 1, seen) for item in obj[:100])
    if training_libraries.is_split_by_node(obj):
        return True
    classes = [cls for cls in type(obj).__mro__ if not cls.__module__.startswith(("torch.", "builtins", "typing"))]
    if any(cls.__module__.startswith("datasets.") for cls in classes):
        return False
    methods = [method for cls in classes for method in vars(cls).values() if isinstance(method, FunctionType)]
    if any(SPLITS & _names(method.__code__) for method in methods if classes):
        return True
    values = vars(obj) if hasattr(obj, "__dict__") else {}
    if any(isinstance(values.get(name), int) and values[name] > 1 for name in COUNTS):
        return True
    return bool(classes) and any(_splits(value, depth - 1, seen) for value in values.values())


def _names(code: CodeType) -> set[str]:
    """That a function reads, also those in what it defines, and the strings by which it asks the environment."""
    names = {*code.co_names, *code.co_freevars}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _names(const)
        elif isinstance(const, str) and const in SPLITS:
            names.add(const)
    return names


class StreamShare:
    """One rank's share of one pass through a stream."""

    def __init__(
        self, deal: Deal, drawing: Callable[[], AbstractContextManager[None]], padded: Callable[[int], None],
        began: Callable[[list[Any]], None] = lambda batches: None, *, drop_last: bool = False, batched: bool = True,
    ) -> None:  # fmt: skip
        """`drawing`: in which what the stream draws is that of one process. `batched`: what it gives are batches of
        samples, which can be cut. `began` is given the first round whole."""
        self.began: Callable[[list[Any]], None] | None = began
        self.deal, self.drawing, self.padded = deal, drawing, padded
        self.drop_last, self.batched = drop_last, batched
        self._over = False

    def next(self, read: Callable[[], Any]) -> Any:
        """This rank's batch of the next round. Raises StopIteration on all ranks in the same round."""
        deal = self.deal
        if self._over:
            raise StopIteration
        if deal.count == 1 or deal.split:
            batch = self._read(read)
            self._begin([batch])
            return batch if deal.count == 1 or deal.whole else self._cut([batch])
        got: list[Any] = []
        try:
            while len(got) < deal.at_a_time:
                got.append(self._read(read))
        except StopIteration:
            self._over = True
            if not got or self.drop_last:
                raise
        self._begin(got)
        sizes = {samples_in(part) for part in got}
        if deal.whole:
            return joined(got) if self.batched else got[0]
        if len(got) == deal.count == deal.at_a_time and len(sizes) == 1:
            return got[deal.index]
        return self._cut(got)

    def _begin(self, got: list[Any]) -> None:
        if self.began is not None and self.deal.count > 1:
            self.began(got)
        self.began = None

    def _read(self, read: Callable[[], Any]) -> Any:
        with self.drawing():
            return read()

    def _cut(self, got: list[Any]) -> Any:
        """Of a round that is incomplete or uneven all ranks get as many samples."""
        deal, sizes = self.deal, list(map(samples_in, got))
        count = sum(sizes)
        cut = self.batched and all(can_be_cut(part, size) for part, size in zip(got, sizes, strict=True))
        if not (cut and can_be_joined(got)):  # each rank needs a batch, and as large a one
            most = max(sizes) if cut else 0
            given = [at % len(got) for at in range(deal.count)]
            self.padded(sum(max(most, sizes[at]) or 1 for at in given) - sum(size or 1 for size in sizes))
            mine = given[deal.index]
            return rows_of(got[mine], [at % sizes[mine] for at in range(most)]) if cut else got[mine]
        batch, short = joined(got), -count % deal.count
        if short:
            self.padded(short)
        rows = [at % count for at in range(count + short)][deal.index :: deal.count]
        return rows_of(batch, rows)
