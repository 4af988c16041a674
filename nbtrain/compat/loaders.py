"""DataLoader's iterators: how far they are, and what they draw from. Nothing here imports torch.

All of it is there in torch 2.8 to 2.15.
"""

from __future__ import annotations

from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch")

ITERATOR = "torch.utils.data.dataloader._BaseDataLoaderIter"
"""The class of what `iter(loader)` returns, with and without workers."""
BATCHES = "torch.utils.data.DataLoader._index_sampler"
"""The loader's property that gives its iterator the sampler to draw from, of batches or of single samples."""
RUNNING = "_iterator"
"""The attribute of a loader with `persistent_workers` that holds its iterator from epoch to epoch."""
its.members(ITERATOR, "__init__", "__next__", "_next_data")
its.fields(ITERATOR, "_num_yielded", "_base_seed", "_index_sampler")
its.fields("torch.utils.data.DataLoader", RUNNING, "_index_sampler")
its.members("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", "_shutdown_workers")


def handed_out(iterator: Any) -> int:
    """How many batches it has handed out."""
    return int(iterator._num_yielded)


def set_handed_out(iterator: Any, count: int) -> None:
    """Set that count, by which it knows its last batch."""
    iterator._num_yielded = count


def running(loader: Any) -> Any:
    """The iterator whose workers live on, if there is one."""
    return loader._iterator if loader.persistent_workers else None


def take_batches_anew(loader: Any, iterator: Any) -> None:
    """Give an iterator whose workers live on the loader's present sampler; it keeps the one of an earlier cell."""
    iterator._index_sampler = loader._index_sampler


def base_seed(iterator: Any) -> int:
    """The seed from which its workers seed their own generators."""
    return int(iterator._base_seed)


def set_base_seed(iterator: Any, seed: int) -> None:
    iterator._base_seed = seed


def pass_over(iterator: Any) -> None:
    """Take a batch without counting it. Raises StopIteration at the end."""
    iterator._next_data()


def end_workers(iterator: Any) -> None:
    """End the workers now, not when the iterator is collected."""
    shut = getattr(iterator, "_shutdown_workers", None)
    if shut is not None:
        shut()
