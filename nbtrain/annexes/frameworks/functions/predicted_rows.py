"""Of the predictions of all batches one, with a row for each sample, in the order of the data set; and its forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nbtrain.base.errors import UsageError


class Ragged(Exception):
    """Parts that cannot be one tensor."""


class SampleOrder:
    """Where each row belongs: `samples` are the indices of the samples, in the loader's order."""

    def __init__(self, samples: torch.Tensor | None = None) -> None:
        self.place: torch.Tensor | None = None
        """which row is the first, the second, …; None: the loader's own order stays"""
        self.unmatched = False
        """something has other than a row for each sample"""
        if samples is not None and len(samples):
            ordered, place = samples.sort()
            one_each = bool((ordered[1:] > ordered[:-1]).all())  # a sampler that repeats samples has no order of these
            if one_each and not torch.equal(ordered, samples):
                self.place = place

    def placed(self, rows: Any) -> Any:
        if self.place is None:
            return rows
        if len(rows) != len(self.place):
            self.unmatched = True
            return rows
        if isinstance(rows, list):
            return [rows[at] for at in self.place.tolist()]
        return rows[self.place if isinstance(rows, torch.Tensor) else self.place.numpy()]

    def placed_values(self, values: Any) -> Any:
        """Of values that each batch has one of: where a batch is a sample, they have an order, too."""
        return self.placed(values) if self.place is not None and len(values) == len(self.place) else values


def whole(batches: list[Any], samples: torch.Tensor | None) -> tuple[Any, bool]:
    """All predictions as one, and whether they stand in the data's order."""
    order = SampleOrder(samples)
    if order.place is not None and len(batches) == len(order.place):  # each batch is a sample
        batches, order = order.placed(batches), SampleOrder()
    return joined(batches, order), not order.unmatched


def joined(parts: list[Any], order: SampleOrder | None = None) -> Any:
    """Of the predictions of all batches one, with a row for each sample."""
    order = order if order is not None else SampleOrder()
    if not parts:
        return parts
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if len({(part.shape[1:], part.ndim) for part in parts}) > 1:
            raise Ragged("predictions of several batches differ in their shapes")
        return order.placed(torch.cat(parts)) if first.ndim else order.placed_values(torch.stack(parts))
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts], order) for name in first}
    if isinstance(first, tuple):
        columns = [joined(list(column), order) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return order.placed([row for part in parts for row in part])
    if hasattr(first, "__array__"):
        import numpy

        return order.placed(numpy.concatenate(parts)) if numpy.ndim(first) else order.placed_values(numpy.stack(parts))
    return order.placed_values(parts)


def check_batch(batch: Any) -> None:
    """Refuse what has one value for a batch beside rows of samples: nobody could tell which belongs to which. Called
    for each batch as it is computed, so that others are not computed for nothing."""
    columns = list(_columns_of(batch, ""))
    rows = next((name for name, count in columns if count is not None and count > 1), None)
    alone = next((name for name, count in columns if count is None), None)
    if rows is not None and alone is not None:
        raise UsageError(
            f"{alone} of a prediction is one value for a whole batch, and {rows} has a row for each sample: give each "
            f'sample its own (a loss with reduction="none"), leave {alone} out, or take to="batches"'
        )


def _columns_of(batch: Any, name: str) -> Iterator[tuple[str, int | None]]:
    """(name, count of rows) of everything that a prediction has. None: it is one value."""
    if isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _columns_of(part, f"{name}[{key!r}]" if name else repr(key))
    elif isinstance(batch, tuple):
        for at, part in enumerate(batch):
            yield from _columns_of(part, f"{name}[{at}]" if name else f"part {at}")
    elif batch is not None:
        yield name, None if is_of_batch(batch) else len(batch)


def is_of_batch(value: Any) -> bool:
    """Whether it is one value for a whole batch."""
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return not getattr(value, "ndim", 0)
    return not isinstance(value, Mapping | list | tuple)


def as_array(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    if isinstance(found, dict):
        return {name: as_array(column) for name, column in found.items()}
    if isinstance(found, tuple):
        rows = list(map(as_array, found))
        return type(found)(*rows) if hasattr(found, "_fields") else tuple(rows)
    return found


def as_frame(predicted: Any) -> Any:
    """A column for each number that a sample has."""
    try:
        import pandas
    except ImportError:
        raise UsageError('to="pandas": pandas is not installed. pip install pandas, or take to="numpy"') from None

    predicted = as_array(predicted)
    if isinstance(predicted, dict):
        columns = {key: column for name, values in predicted.items() for key, column in _columns(name, values)}
        lengths = {len(column): key for key, column in columns.items()}
        if len(lengths) > 1:
            (count, name), (other_count, other), *_ = lengths.items()
            raise UsageError(f'to="pandas": {name!r} has {count} rows, and {other!r} {other_count}; take to="numpy"')
        return pandas.DataFrame(columns)
    if isinstance(predicted, tuple):
        raise UsageError('to="pandas" wants a tensor or a dict with a name for each column, and a tuple has none')
    if getattr(predicted, "ndim", 1) > 2:
        raise UsageError(
            f'to="pandas": a prediction has the shape {predicted.shape[1:]}, which is no row; take to="numpy"'
        )
    return pandas.Series(predicted) if getattr(predicted, "ndim", 1) == 1 else pandas.DataFrame(predicted)


def _columns(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for key, part in values.items():
            yield from _columns(f"{name}_{key}", part)
    elif isinstance(values, tuple):
        for at, part in enumerate(values):
            yield from _columns(f"{name}_{at}", part)
    elif getattr(values, "ndim", 1) == 1:
        yield name, values
    else:
        flat = values.reshape(len(values), -1)
        for at in range(flat.shape[1]):
            yield f"{name}_{at}", flat[:, at]
