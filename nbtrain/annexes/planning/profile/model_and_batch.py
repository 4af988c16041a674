"""Finds what a plan is made for: a model of the notebook, the optimizer that trains it, and one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from nbtrain.annexes.planning.profile.profile import profile
from nbtrain.base.errors import UsageError
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.units_to_wrap import callable_by_itself
from nbtrain.strategies.memory_estimate import Profile
from nbtrain.worker.random_states.default_generators import capture, restore

GUESSED = ("xb, yb", "x, y", "X, y", "batch", "x", "X")
"""names that a batch may have, those of a loop's body first"""
OTHERS = ("val", "valid", "test", "eval", "dev")
"""parts of names of loaders that are not for training"""
GUESS = 32
"""samples of a batch, where a batch sampler does not say how many"""
NOT_THEIRS = ("In", "Out", "exit", "quit", "get_ipython")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAndBatch:
    """A model, its optimizer and a batch, with their names in the notebook."""

    name: str
    model: nn.Module
    optimizer: Optimizer | None
    optimizer_name: str
    """empty: there is no optimizer"""
    batch: Any
    batch_name: str
    """`loader`, `x, y`"""
    notes: tuple[str, ...] = ()
    """which of several candidates was chosen, in sentences"""

    def profile(self, precision: str) -> Profile:
        """The profile of one step, with the model's name and the notes. Allocates nothing for the model."""
        made = profile(self.model, self.batch, self.optimizer, precision=precision)
        return replace(made, model=self.name, notes=(*made.notes, *self.notes))


def find_model_and_batch(notebook: Mapping[str, Any], model: str = "", batch: str = "") -> ModelAndBatch:
    """`model`, `batch`: names of the notebook; empty: the most likely one.

    A batch may be a tensor, a tuple, list or dict of tensors, or a DataLoader, whose first samples are collated without
    iterating it. Raises a UsageError that says what to name if nothing fits.
    """
    theirs = {name: value for name, value in notebook.items() if not name.startswith("_") and name not in NOT_THEIRS}
    notes: list[str] = []
    name = model or _main_model(theirs, notes)
    found = _model(theirs, name)
    optimizer_name = _optimizer(theirs, name, found, notes)
    batch_name = batch or _main_batch(theirs, name, notes)
    return ModelAndBatch(
        name=name,
        model=found,
        optimizer=theirs[optimizer_name] if optimizer_name else None,
        optimizer_name=optimizer_name,
        batch=_batch(theirs, batch_name),
        batch_name=batch_name,
        notes=tuple(notes),
    )


def find_optimizer(notebook: Mapping[str, Any], value: Any) -> Optimizer:
    """The optimizer that the user gave, as an object or by its name."""
    name = value if isinstance(value, str) else "optimizer"
    found = _value(notebook, name, lambda one: _is(one, Optimizer), "an optimizer") if name is value else value
    if not _is(found, Optimizer):
        raise UsageError(f"{name} is {_kind(found)}, not a torch.optim optimizer; leave it out to have one found")
    if not hasattr(found, "param_groups"):
        raise UsageError(f"{name}, {_kind(found)}, has no param_groups: name the optimizer that it wraps")
    chosen: Optimizer = found
    return chosen


def _is(value: Any, kind: type) -> bool:
    """An isinstance that runs no code of the object's class."""
    return issubclass(type(value), kind)


def _unique(theirs: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Objects of this kind, each once, under its first name."""
    found: dict[int, str] = {}
    for name, value in theirs.items():
        if _is(value, kind):
            found.setdefault(id(value), name)
    return {name: theirs[name] for name in found.values()}


def _weights(model: nn.Module) -> int:
    return sum(1 if is_lazy(p) else p.numel() for p in model.parameters() if p.requires_grad)


def _main_model(theirs: Mapping[str, Any], notes: list[str]) -> str:
    models = {name: m for name, m in _unique(theirs, nn.Module).items() if _weights(m) and callable_by_itself(m)}
    parts = {id(part) for m in models.values() for part in m.modules() if part is not m}
    outer = sorted((name for name, m in models.items() if id(m) not in parts), key=lambda name: -_weights(models[name]))
    if not outer:
        raise UsageError(
            "the notebook has no model with trainable weights; make an nn.Module and name it: "
            "%distributed plan model --batch x"
        )
    if len(outer) > 1:
        notes.append(f"of {_listed(outer)}, {outer[0]} is planned: it has the most weights. Name another to plan it")
    return outer[0]


def _model(theirs: Mapping[str, Any], name: str) -> nn.Module:
    value = _value(theirs, name, lambda one: _is(one, nn.Module), "a model")
    if not _is(value, nn.Module):
        raise UsageError(f"{name} is {_kind(value)}, not a model: a plan needs an nn.Module")
    if not callable_by_itself(value):
        raise UsageError(f"{name} is a {type(value).__name__}, which has no forward: name the model that it is part of")
    found: nn.Module = value
    return found


def _optimizer(theirs: Mapping[str, Any], name: str, model: nn.Module, notes: list[str]) -> str:
    """The name of the optimizer that trains most of the model's weights; empty: none does."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    counts = {
        other: sum(id(p) in trained for group in getattr(one, "param_groups", ()) for p in group["params"])
        for other, one in _unique(theirs, Optimizer).items()
    }
    counts = {other: count for other, count in counts.items() if count}
    if not counts:
        return ""
    best = max(counts, key=lambda other: counts[other])
    if counts[best] < len(trained):
        notes.append(f"{best} has {counts[best]} of the {len(trained)} weights of {name}; it does not step the others")
    elif len(counts) > 1:
        rest = [other for other in counts if other != best]
        notes.append(f"{best} is assumed to train {name}, not {_listed(rest)}")
    return best


def _main_batch(theirs: Mapping[str, Any], name: str, notes: list[str]) -> str:
    loaders = sorted(_unique(theirs, DataLoader), key=_rank)
    if loaders:
        if len(loaders) > 1:
            notes.append(f"batches come from {loaders[0]}, not from {_listed(loaders[1:])}")
        return loaders[0]
    for names in GUESSED:
        values: list[Any] = [theirs.get(one) for one in names.split(", ")]
        rows = {value.shape[:1] if _is(value, torch.Tensor) else () for value in values}
        if all(map(_is_batch, values)) and (len(values) == 1 or (len(rows) == 1 and () not in rows)):
            return names
    raise UsageError(
        f"no batch found for {name}: name one, or a DataLoader, as in --batch x, --batch x,y or --batch loader"
    )


def _rank(name: str) -> tuple[bool, bool]:
    """Sort key of loaders: those for training first."""
    low = name.lower()
    return any(other in low for other in OTHERS), "train" not in low


def _is_batch(value: Any) -> bool:
    if _is(value, Mapping):
        return any(_is(part, torch.Tensor) for part in value.values())
    if _is(value, tuple) or _is(value, list):
        return any(_is(part, torch.Tensor) for part in value)
    return _is(value, torch.Tensor)


def _batch(theirs: Mapping[str, Any], name: str) -> Any:
    """The batch of this name; `x,y` is a tuple of both."""
    names = [part.strip() for part in name.strip("()").split(",") if part.strip()]
    if not names:
        raise UsageError("--batch takes a name of the notebook, as in --batch x or --batch loader")
    values = [_value(theirs, one, _may_be_batch, "a batch") for one in names]
    if len(values) > 1:
        return tuple(values)
    (value,) = values
    if _is(value, DataLoader):
        return _first_batch(names[0], value)
    if _is(value, nn.Module) or not (_may_be_batch(value) or hasattr(type(value), "__dataclass_fields__")):
        raise UsageError(
            f"{names[0]} is {_kind(value)}, not a batch: that is a tensor, a tuple, list or dict of tensors, or a "
            "DataLoader"
        )
    return value


def _may_be_batch(value: Any) -> bool:
    return _is(value, DataLoader) or _is_batch(value)


def _value(theirs: Mapping[str, Any], name: str, wanted: Any, what: str) -> Any:
    """The notebook's value of this name, which may have attributes (`trainer.model`)."""
    first, *rest = name.split(".")
    if first not in theirs:
        likely = [other for other, value in theirs.items() if wanted(value)]
        close = get_close_matches(first, likely, n=1) or get_close_matches(first, list(theirs), n=1)
        if close:
            raise UsageError(f"the notebook has no {first!r}; did you mean {close[0]}?")
        there = f"; {what} could be {_listed(likely)}" if likely else ""
        raise UsageError(f"the notebook has no {first!r}{there}")
    value = theirs[first]
    for attribute in rest:
        try:
            value = getattr(value, attribute)
        except AttributeError:
            raise UsageError(f"{first} has no {attribute!r}: {_kind(value)}") from None
    return value


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def _listed(names: Iterable[str]) -> str:
    several = list(names)
    return several[0] if len(several) == 1 else f"{', '.join(several[:-1])} and {several[-1]}"


# ---------------------------------------------------------------- a batch of a loader that is not iterated


def _first_batch(name: str, loader: DataLoader[Any]) -> Any:
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
            f"the first samples of {name} make no batch ({type(error).__name__}: {error}); make one "
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
            f"the dataset of {name} can be iterated only once, so no sample is taken from it; make a batch yourself "
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
