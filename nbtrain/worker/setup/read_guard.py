"""Raises where a block `with whole(…)` reads what it does not show: it is in pieces, or was taken before the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat.dtensor import is_divided
from nbtrain.compat.function_modes import FunctionGuard, name_of
from nbtrain.strategies.kit.memory_left_behind import left_by
from nbtrain.strategies.kit.owned_tensors import ANSWERED
from nbtrain.strategies.kit.stage_spot import SPOT
from nbtrain.worker.setup.components import Components
from nbtrain.worker.setup.shown_tensors import Shown, ShownGradient, tensors_in
from nbtrain.worker.setup.taken_tensors import TakenTensors

STALE = (
    "{name} is in pieces here: `with whole(…)` names other tensors, or this variable was taken from the model before "
    "it. Name {whose}, too, with whole(…, {whose}), or all that the cell uses: with whole(); and read it from the "
    "model inside, or write `with whole(p) as p:`"
)
OUTSIDE = (
    "a tensor in pieces that was made outside of `with whole(…)`, as torch.zeros_like(p), p.detach() and "
    "model.state_dict() make them: make it in such a block, too, as in `with whole(model): sums = "
    "[torch.zeros_like(p) for p in model.parameters()]`, or use it outside. Of what was taken from the model in "
    "another block, take a copy there: `copy.deepcopy(model.state_dict())`"
)
BEFORE = (
    "a tensor that was taken from {name} before `with whole(…)`, as `w = p.detach()` or `state = model.state_dict()`, "
    "and that shares its memory in one process only: read it from the model inside of the block, or take a copy of "
    "its own (`w.clone()`, `copy.deepcopy(state)`)"
)
GRADIENTS = (
    "p.grad inside of `with whole(…)`: gradients are in pieces, too, and stay so unless they are asked for: write "
    "with whole(…, gradients=True), between loss.backward() and optimizer.step()"
)
FREEZES = frozenset({"requires_grad_", "requires_grad ="})


class ReadGuard:
    """Between `on` and `off` it looks at what torch's functions are given."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self._guard = FunctionGuard(self._look)
        self._apart: dict[int, str] = {}
        """id → name of what is in pieces"""
        self._ungraded: set[int] = set()
        """ids of parameters whose gradients are in pieces"""
        self._put_back: dict[int, Shown] = {}
        """by id of what is complete only in the block: a piece of it is what a backward below would find"""
        self.taken = TakenTensors()

    def on(self, tensors: Iterable[Shown], gradients: Iterable[ShownGradient]) -> None:
        """`tensors` and `gradients`: all that ranks keep in pieces."""
        self._apart = {id(one.tensor): one.name for one in tensors if one.apart}
        self._ungraded = {id(p) for one in gradients if one.apart for p in (one.tensor, one.now)}
        opened = [one for one in tensors if one.is_open and not one.piece.everywhere]
        self._put_back = {id(one.now): one for one in opened}
        self.taken.watch(opened)
        self._guard.on()

    def off(self) -> None:
        self._guard.off()
        self._apart, self._ungraded, self._put_back = {}, set(), {}

    def _look(self, function: Any, arguments: Any) -> Callable[[Any], None] | None:
        name, used = name_of(function), []
        if name in ("grad", "grad ="):
            if any(id(tensor) in self._ungraded for tensor in tensors_in(arguments)):
                raise NotSupported(GRADIENTS)
        elif name not in ANSWERED and name not in FREEZES:
            for tensor in tensors_in(arguments):
                if (held := self._apart.get(id(tensor))) is not None:
                    raise NotSupported(STALE.format(name=held, whose=self._whose(held)))
                if is_divided(tensor) or hasattr(tensor, SPOT):  # torch.compile traces this, and knows no vars()
                    raise NotSupported(OUTSIDE)
                if (held := left_by(tensor)) is not None:
                    raise NotSupported(BEFORE.format(name=held))
                if (shown := self._put_back.get(id(tensor))) is not None:
                    used.append(shown)
        return partial(self._after, used, arguments[0][1] if name == "data =" else None)

    def _after(self, used: Sequence[Shown], memory: torch.Tensor | None, computed: Any) -> None:
        for item in used:
            if item.stands is None:
                item.follow(computed)
            if memory is not None:
                self.taken.given(item, memory)
        self.taken.note(computed)

    def _whose(self, name: str) -> str:
        """The model or the optimizer that has the tensor of this name."""
        components = [prepared.component for prepared in self.components.prepared]
        named = [
            key
            for component in components
            for key in (*component.modules, *component.optimizers)
            if name.startswith(key)
        ]
        return max(named, key=len, default=name)
