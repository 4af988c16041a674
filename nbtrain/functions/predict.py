"""`nbtrain.predict(model, loader, devices=4)`: what a model says of a data set, computed by all ranks, in its order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from nbtrain.errors import UsageError
from nbtrain.trainer.module import has
from nbtrain.trainer.predictions import Predictions
from nbtrain.trainer.run_cell import errors_in_short
from nbtrain.trainer.trainer import Trainer

FORMS = ("tensor", "numpy", "pandas", "batches")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@errors_in_short()
def predict(
    model: Any,
    data: Any,
    step: Callable[[Any, Any], Any] | None = None,
    *,
    strategy: Any = "auto",
    devices: Any = "auto",
    accelerator: Any = "auto",
    precision: Any = None,
    to: str = "tensor",
    batch_size: int = 32,
) -> Any:
    """What the model gives for each sample of a loader or data set: one row for each, in the data's order.

    Whole batches are dealt out to the ranks, so that each is what one process computes. `step(model, batch)` says how a
    batch is computed; without it, it is `predict_step` where the model has one, else the model is given a dict by its
    names, and of a tuple as many parts as `forward` takes. `to`: "tensor", "numpy", "pandas" (a Series or a DataFrame),
    "batches" (a list, as the loader has them). What is more than `Trainer.predictions_in_memory` stays on disk, in
    batches.
    """
    if to not in FORMS:
        raise UsageError(f"to={to!r}: {', '.join(map(repr, FORMS))}")
    has_rows = hasattr(data, "__getitem__") and hasattr(data, "__len__")  # as a data set of Hugging Face's
    if isinstance(data, Dataset) or (has_rows and not isinstance(data, DataLoader | torch.Tensor | Mapping | str)):
        data = DataLoader(data, batch_size)
    if not isinstance(data, DataLoader):
        raise UsageError(f"predict takes a DataLoader or a Dataset, not {type(data).__name__}")
    trainer = Trainer(
        strategy=strategy, devices=devices, accelerator=accelerator, precision=precision, enable_checkpointing=False
    )
    if step is not None or not has(model, "predict_step"):
        trainer.own_step = step if step is not None else call_model
    batches = trainer.predict(model, data)
    if to == "batches" or isinstance(batches, Predictions):
        return batches
    try:
        found = joined(batches)
    except Ragged as why:
        print(f"nbtrain: {why}, so that they are returned in batches")
        return batches
    return found if to == "tensor" else _as_array(found) if to == "numpy" else _as_frame(found)


def call_model(model: Any, batch: Any) -> Any:
    """A batch as most loaders have it: inputs alone, inputs and targets, or a dict of named inputs."""
    if isinstance(batch, Mapping):
        takes = inspect.signature(model.forward).parameters
        if any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            return model(**batch)
        named = {name: value for name, value in batch.items() if name in takes}
        return model(**named) if named else model(batch)
    if isinstance(batch, tuple | list):
        takes = inspect.signature(model.forward).parameters
        needed = [one for one in takes.values() if one.kind in POSITIONAL and one.default is one.empty]
        return model(*batch[: max(1, len(needed))])
    return model(batch)


class Ragged(Exception):
    """Parts that cannot be one tensor."""


def joined(parts: list[Any]) -> Any:
    """Of the predictions of all batches one, with a row for each sample."""
    if not parts:
        return parts
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if len({(one.shape[1:], one.ndim) for one in parts}) > 1:
            raise Ragged("predictions of several batches differ in their shapes")
        return torch.cat(parts) if first.ndim else torch.stack(parts)
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        columns = [joined(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return [row for part in parts for row in part]
    if hasattr(first, "__array__"):
        import numpy

        return numpy.concatenate(parts)
    return parts


def _as_array(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return (found.float() if found.dtype == torch.bfloat16 else found).numpy()
    if isinstance(found, dict):
        return {name: _as_array(one) for name, one in found.items()}
    if isinstance(found, tuple):
        rows = list(map(_as_array, found))
        return type(found)(*rows) if hasattr(found, "_fields") else tuple(rows)
    return found


def _as_frame(found: Any) -> Any:
    """A column for each number that a sample has."""
    try:
        import pandas
    except ImportError:
        raise UsageError('to="pandas": pandas is not installed. pip install pandas, or take to="numpy"') from None

    found = _as_array(found)
    if isinstance(found, dict):
        return pandas.DataFrame({key: column for name, one in found.items() for key, column in _columns(name, one)})
    if isinstance(found, tuple):
        raise UsageError('to="pandas" wants a tensor or a dict with a name for each column, and a tuple has none')
    if getattr(found, "ndim", 1) > 2:
        raise UsageError(f'to="pandas": a prediction has the shape {found.shape[1:]}, which is no row; take to="numpy"')
    return pandas.Series(found) if getattr(found, "ndim", 1) == 1 else pandas.DataFrame(found)


def _columns(name: str, values: Any) -> list[tuple[str, Any]]:
    if getattr(values, "ndim", 1) == 1:
        return [(name, values)]
    flat = values.reshape(len(values), -1)
    return [(f"{name}_{at}", flat[:, at]) for at in range(flat.shape[1])]
