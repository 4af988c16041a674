"""Finds out how a training loop calls a model with a batch, and what its loss is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.annexes.planning.profile.memory_trace import CannotProfile
from nbtrain.strategies.kit.call_arguments import all_tensors
from nbtrain.worker.precision.autocast import changed

TARGETS = ("target", "targets", "label", "labels", "y")
"""names of the target among a forward's arguments, where the forward computes the loss itself"""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """`model(*given, **named)`, and the targets that its output is compared with."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    targets: tuple[Any, ...]
    samples: int
    notes: tuple[str, ...] = ()

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ModelCall:
        return ModelCall(
            tuple(changed(one, change) for one in self.given),
            {name: changed(one, change) for name, one in self.named.items()},
            tuple(changed(one, change) for one in self.targets),
            self.samples,
            self.notes,
        )

    def cut(self, samples: int) -> ModelCall:
        """The same call with only the first samples of the batch."""

        def first(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.dim() and tensor.shape[0] == self.samples
            return tensor[:samples].clone() if whole else tensor

        cut = self.changed(first)
        return ModelCall(cut.given, cut.named, cut.targets, samples, cut.notes)


def find_call(model: nn.Module, batch: Any) -> ModelCall:
    """How to call the model with this batch. A dict holds arguments by name if the forward takes them."""
    samples = next((t.shape[0] if t.dim() else 1 for t in all_tensors(batch)), 0)
    if not samples:
        raise CannotProfile(
            f"the batch is {type(batch).__name__} and holds no tensor with samples; name what the model is "
            "called with, as in --batch x, or a DataLoader"
        )
    parameters = _parameters(model)
    if isinstance(batch, Mapping):
        return _by_name(batch, parameters, samples)
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return _in_order(model, tuple(batch), parameters, samples)
    return ModelCall((batch,), {}, (), samples)


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # a compiled function may have none
        return []


def _by_name(batch: Mapping[Any, Any], parameters: list[inspect.Parameter], samples: int) -> ModelCall:
    names = {one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    if any(one.kind is one.VAR_KEYWORD for one in parameters) or names >= set(batch):
        return ModelCall((), dict(batch), (), samples)
    taken = {key: value for key, value in batch.items() if key in names}
    if not taken:
        return ModelCall((batch,), {}, (), samples)
    left = {key: value for key, value in batch.items() if key not in names}
    note = f"the model gets {', '.join(taken)} of the batch, as its forward names them, not {', '.join(left)}"
    return ModelCall((), taken, tuple(left.values()), samples, (note,))


def _in_order(model: nn.Module, batch: tuple[Any, ...], parameters: list[inspect.Parameter], samples: int) -> ModelCall:
    several = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = max(sum(one.default is one.empty for one in places), 1)
    if several and len(batch) > 1 and not (len(batch) == 2 and _is_target(batch[1])):
        needed = len(batch)
    # A forward that takes the target computes its loss itself, which belongs to its activations.
    while needed < min(len(batch), len(places)) and places[needed].name in TARGETS:
        needed += 1
    if needed >= len(batch):
        return ModelCall(batch, {}, (), samples)
    count = f" {needed}" if needed > 1 else ""
    note = f"the model is called with the first{count} of the batch's {len(batch)} parts"
    return ModelCall(batch[:needed], {}, batch[needed:], samples, (note,))


def _is_target(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def find_loss(output: Any, targets: tuple[Any, ...]) -> tuple[torch.Tensor, str]:
    """The loss that a backward starts from, and a sentence that says what it was."""
    found = [t for t in all_tensors(output) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not found:
        raise CannotProfile(
            f"the model returned {type(output).__name__} without a tensor that requires grad, so there is no "
            "backward to plan"
        )
    ready = [t for t in found if t.dim() == 0]
    if ready:
        return _total(ready), "the loss is what the model returns"
    for target in targets:
        if isinstance(target, torch.Tensor):
            for one in found:
                compared = _compared(one, target)
                if compared is not None:
                    return compared
    return _total([t.abs().mean() if t.is_complex() else t.mean() for t in found]), (
        "the loss is assumed to be the mean of the model's output"
    )


def _total(losses: list[torch.Tensor]) -> torch.Tensor:
    total = losses[0]
    for one in losses[1:]:
        total = total + one
    return total


def _compared(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, str] | None:
    shape = tuple(output.shape)
    if target.is_floating_point():
        same = tuple(target.shape) == shape
        return (F.mse_loss(output, target.to(output.dtype)), "the loss is assumed to be mse_loss") if same else None
    told = "the loss is assumed to be cross_entropy"
    if output.dim() > 1 and tuple(target.shape) == shape[:-1]:
        return F.cross_entropy(output.flatten(0, -2), target.flatten().long()), told
    if output.dim() > 2 and tuple(target.shape) == (shape[0], *shape[2:]):
        return F.cross_entropy(output, target.long()), told
    return None
