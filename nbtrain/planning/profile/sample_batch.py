"""Makes one batch of a DataLoader without iterating it: no worker starts, no random number is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from nbtrain.errors import UsageError
from nbtrain.training.random_states.default_generators import capture, restore

GUESS = 32
"""samples of a batch, where a batch sampler does not say how many"""


def first_batch(name: str, loader: DataLoader[Any]) -> Any:
    """The dataset's first samples, collated by the loader's own function. Raises a UsageError if that fails."""
    random_state = capture()
    try:
        if isinstance(loader.dataset, IterableDataset):
            return _streamed(name, loader)
        return _indexed(name, loader)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"no batch could be made of the first samples of {name} ({type(error).__name__}: {error}); make one "
            "yourself, as in x, y = next(iter(loader)), and write --batch x,y"
        ) from error
    finally:
        restore(random_state)


def _indexed(name: str, loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:  # the dataset gives whole batches
        return loader.collate_fn(dataset[0])
    count = min(_count(loader), len(dataset))
    if not count:
        raise UsageError(f"the dataset of {name} is empty; name something else with --batch")
    indices = list(range(count))
    if callable(getattr(dataset, "__getitems__", None)):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[i] for i in indices])


def _streamed(name: str, loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    samples = iter(dataset)
    once = samples is dataset or samples is iter(dataset)
    if once or any(isinstance(held, Iterator) for held in vars(dataset).values()):
        raise UsageError(
            f"the dataset of {name} can be gone through once only, so nothing is taken from it; make a batch yourself "
            "and name it, as in --batch x"
        )
    count = 1 if loader.batch_size is None else _count(loader)
    found = list(islice(samples, count))
    if not found:
        raise UsageError(f"the dataset of {name} gives nothing; name something else with --batch")
    return loader.collate_fn(found[0] if loader.batch_size is None else found)


def _count(loader: DataLoader[Any]) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else GUESS
