"""Calls of a model are cut along the batch: who computes the parts and puts them together is for a strategy to say.

While a cell runs, each of the models has an attribute that `nn.Module.__call__` looks up, and nothing else: its class,
its methods and its hooks are the user's own. Only calls from outside are cut: what a model calls inside of itself has
a part of the batch already, and its own methods run as they stand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

from nbtrain.compat import engine
from nbtrain.compat.layers import NormLayer, call_as_torch_does
from nbtrain.strategies.kit.batch_parts import Form, batch_of, flatten, sizes_of
from nbtrain.strategies.kit.batch_plans import LAZY, Plan, examine, why_whole
from nbtrain.strategies.kit.module_replicas import ROAD

_roads: dict[int, CutCalls] = {}
_inside: ContextVar[bool] = ContextVar("inside a call that is cut", default=False)

Plain = Callable[[], Any]


class Call:
    """One call of a model from outside."""

    __slots__ = ("batch", "form", "module", "plain", "plan", "sizes", "tensors")

    def __init__(
        self, module: nn.Module, plain: Plain, tensors: list[torch.Tensor], form: Form, batch: int, sizes: list[int]
    ) -> None:
        self.module = module
        self.plain = plain
        """the call as it stands"""
        self.tensors, self.form = tensors, form
        """what it was given"""
        self.batch, self.sizes = batch, sizes
        self.plan = Plan()


class CutCalls:
    """Of one component. `on` while a cell runs."""

    def __init__(self, strategy: str, parts: int, run: Callable[[Call], Any], cuda: bool) -> None:
        """`run`: what happens instead of a call; its plan says whether it can be cut."""
        self.strategy = strategy
        self.parts = parts
        self.run = run
        self.cuda = cuda
        self.modules: list[nn.Module] = []
        self.plans: dict[Any, Plan] = {}
        self.inner: set[int] = set()
        """modules that others call"""
        self.said: set[str] = set()

    def on(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if next(module.parameters(), None) is not None and ROAD not in vars(module):
                vars(module)[ROAD] = MethodType(_call_impl, module)
                _roads[id(module)] = self
                self.modules.append(module)

    def off(self) -> None:
        for module in self.modules:
            vars(module).pop(ROAD, None)
            _roads.pop(id(module), None)
        self.modules.clear()
        self.plans.clear()
        self.inner.clear()
        self.said.clear()

    def let_go(self) -> Callable[[], None]:
        """Hold no module until what is returned is called. Nothing that was known of those that are gone by then is
        taken for another one's, which may lie in the same place."""
        held = [(id(module), ref(module)) for module in self.modules]
        self.modules.clear()

        def again() -> None:
            found = [(number, alive()) for number, alive in held]
            self.modules += [module for _, module in found if module is not None]
            gone = {number for number, module in found if module is None}
            for number in gone:
                _roads.pop(number, None)
            self.plans = {key: plan for key, plan in self.plans.items() if key[0] not in gone}
            if gone:
                self.inner.clear()  # parts of theirs may be among these; a call tells again

        return again

    def called(self, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors, form = flatten((args, kwargs))
        batch = batch_of(tensors)
        call = Call(module, plain, tensors, form, batch, sizes_of(batch, self.parts))
        call.plan = self._plan(call)
        return self.run(call)

    def give_up(self, call: Call, reason: str) -> None:
        """It turned out that it cannot be cut."""
        self.plans[_kind(call)] = call.plan = Plan(reason)
        self._say(call.module, reason)

    def _plan(self, call: Call) -> Plan:
        if len(call.sizes) < 2:
            return Plan("there is nothing to cut")
        if call.module.training and not torch.is_grad_enabled() and _counts(call.module):
            return Plan("it collects statistics, as `update_bn` does")
        key = _kind(call)
        plan = self.plans.get(key)
        if plan is None:
            reason = why_whole(call.module)
            if reason == LAZY:
                return Plan(reason)
            if reason:
                plan = Plan(reason)
            else:
                plan = examine(call.module, call.tensors, call.form, call.batch, call.sizes, self.cuda)
            self.plans[key] = plan
            if plan.reason:
                self._say(call.module, plan.reason)
        return plan

    def _say(self, module: nn.Module, reason: str) -> None:
        text = (
            f"{type(module).__name__} is called with whole batches, which is right but no faster than "
            f"--strategy single: {reason}"
        )
        if text not in self.said:
            self.said.add(text)
            warnings.warn(f"{self.strategy}: {text}", stacklevel=2)


def _counts(module: nn.Module) -> bool:
    return any(isinstance(part, NormLayer) and part.track_running_stats for part in module.modules())


def _kind(call: Call) -> Any:
    long = tuple(bool(t.dim()) and len(t) == call.batch for t in call.tensors)
    return id(call.module), call.module.training, call.form.key, long


def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    road = _roads.get(id(self))  # a copy of the model has none
    if road is None or torch.compiler.is_compiling():
        return call_as_torch_does(self, *args, **kwargs)
    if _inside.get():
        road.inner.add(id(self))
        return call_as_torch_does(self, *args, **kwargs)
    again = engine.in_backward()  # which computes it again, as it was the first time
    vmapped = engine.in_functional_transform()  # the batch is not to be seen
    if vmapped or (again and id(self) in road.inner):
        return call_as_torch_does(self, *args, **kwargs)
    token = _inside.set(True)
    try:
        return road.called(self, lambda: call_as_torch_does(self, *args, **kwargs), args, kwargs)
    finally:
        _inside.reset(token)
