"""How `predict` computes a batch, and what it keeps of what a model gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nbtrain.annexes.frameworks.functions.predicted_rows import check_batch, is_of_batch
from nbtrain.base.errors import UsageError
from nbtrain.compat import lightning

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
CACHES = ("past_key_values", "cache_params", "mems")
"""names under which models of transformers give what only their own next call is for"""


class PredictionStep:
    """What a rank calls with the model and a batch."""

    def __init__(self, step: Callable[[Any, Any], Any] | None, as_rows: bool) -> None:
        """`step`: the user's. `as_rows`: batches become one, with a row for each sample."""
        self.step, self.as_rows = step, as_rows

    def __call__(self, model: Any, batch: Any, number: int = 0) -> Any:
        if self.step is None and lightning.has_own(model, "predict_step"):
            prediction = model.predict_step(*(batch, number)[: _positions(model.predict_step)])
        else:
            prediction = kept((self.step or call_model)(model, batch), self.as_rows and self.step is None)
        if self.as_rows:
            check_batch(prediction)
        return prediction


def _positions(function: Callable[..., Any]) -> int:
    """How many arguments by position it takes."""
    takes = inspect.signature(function).parameters.values()
    return (
        2
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes)
        else sum(parameter.kind in POSITIONAL for parameter in takes)
    )


def kept(output: Any, rows_alone: bool = False) -> Any:
    """Of a dict, as models of transformers give it, what are values. `rows_alone`: without what a whole batch has one
    of, a loss, where there are rows beside it."""
    if not isinstance(output, Mapping):
        return output
    values = {name: value for name, value in output.items() if name not in CACHES and _holds_values(value)}
    rows = {name: value for name, value in values.items() if not is_of_batch(value)}
    chosen = rows if rows_alone and rows else values
    return chosen if chosen and len(chosen) < len(output) else output


def _holds_values(value: Any) -> bool:
    kinds = torch.Tensor | Mapping | list | tuple | int | float | complex | str | bytes
    return isinstance(value, kinds) or hasattr(value, "__array__")


def call_model(model: Any, batch: Any) -> Any:
    """A batch as most loaders have it: inputs alone, inputs and targets, or a dict of named inputs."""
    if not isinstance(batch, Mapping | tuple | list):
        return model(batch)
    takes = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, parameter in takes.items()
        if parameter.kind in POSITIONAL and parameter.default is parameter.empty
    ]
    more = {"use_cache": False} if "use_cache" in takes else {}
    if not isinstance(batch, Mapping):
        if len(batch) < len(needed):
            raise UsageError(_no_fit(model, f"{len(batch)} parts", needed, "batch[0], …"))
        return model(*batch[: max(1, len(needed))], **more)
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    named = {name: value for name, value in batch.items() if any_name or name in takes}
    if named and set(needed) <= set(named):
        return model(**more | named)
    first = f"batch[{next(iter(batch), 'name')!r}]"
    if named or len(needed) > 1 or not takes:
        raise UsageError(_no_fit(model, _listed(batch), needed, f"{first}, …"))
    try:
        return model(batch)  # one that takes dicts
    except (TypeError, AttributeError) as error:
        said = f"; given the dict itself it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UsageError(_no_fit(model, _listed(batch), needed, first, said)) from error


def _no_fit(model: Any, has: str, needed: Iterable[str], example: str, why: str = "") -> str:
    takes = ", ".join(needed) or "none of these"
    return (
        f"a batch has {has}, and forward of {type(model).__name__} takes {takes}{why}. Say how they go together: "
        f"nbtrain.predict(model, loader, lambda model, batch: model({example}))"
    )


def _listed(batch: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, batch)) or "no names"
