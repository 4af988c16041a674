"""`--accumulate K`: an optimizer step every K-th call, so that K small batches make one large one.

Rules.
- Every `backward()` of a loss counts 1/K, so that a step sees the *mean* over its K calls: with a mean loss and
  batches of one size that is the gradient of the large batch. (`torch.autograd.grad` is not scaled.)
- In between, `step`, `zero_grad`, `scheduler.step`, clipping and a GradScaler do nothing, and nothing is communicated.
- The last batch of a loader always ends in a step, the mean being taken over the calls there were. A cell that ends
  in the middle of a group (a `break`) drops what it had gathered: its gradients are set to None.
- One optimizer per cell: with two, the gradients one of them discards could not be told from those to keep.

Nothing of this outlives the cell: methods of optimizers are replaced on entry and put back on leaving.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.compat.optimizers import MARK, has_schedule_mark
from nbtrain.errors import NotPrepared, NotSupported
from nbtrain.intercept import Listeners
from nbtrain.strategies.base import Prepared


class Accumulation:
    """Gates the optimizer of one cell."""

    def __init__(self, every: int, at_last_batch: Callable[[], bool], prepared: Callable[[], Iterable[Prepared]]):
        self.every = every
        self.at_last_batch = at_last_batch
        self.prepared = prepared
        self.calls = 0  # of `step` since the last real one
        self.rescaled = False
        self.optimizer: Optimizer | None = None
        self.gated: WeakSet[Optimizer] = WeakSet()
        self.listeners = Listeners()
        self.over = False

    @property
    def due(self) -> bool:
        """Whether the next call of `step` is a real one."""
        return self.calls + 1 >= self.every or self.at_last_batch()

    @property
    def between(self) -> bool:
        return self.calls > 0

    def enter(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            self.gate(optimizer)
        self._quiet("torch.optim.Optimizer.zero_grad", lambda: self.between)
        self._quiet("torch.nn.Module.zero_grad", lambda: self.between)
        for schedule in _with_own_step(LRScheduler):
            self._quiet("torch.optim.lr_scheduler.LRScheduler.step", lambda: self.between, schedule)
        self._quiet("torch.amp.GradScaler.unscale_", lambda: not self.due)
        self._quiet("torch.amp.GradScaler.update", lambda: self.between)
        self.listeners.listen("torch.amp.GradScaler.step", "accumulation", self._scaler_step)

    def leave(self) -> None:
        self.over = True
        if self.calls and self.optimizer is not None:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        self.listeners.close()
        for optimizer in self.gated:
            own = vars(optimizer)
            if getattr(own.get("step"), "nbtrain_gate", None) is not self:
                continue  # a scheduler made in the cell has put its wrapper around it; the gate is open from now on
            before = own.pop("step").before
            if before is not None:
                own["step"] = before
        self.gated.clear()

    def gate(self, optimizer: Optimizer) -> None:
        """Let only every K-th call of this optimizer's `step` through."""
        if optimizer in self.gated:
            return
        own = vars(optimizer).get("step")  # a scheduler puts its wrapper here

        def step(this: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self.real_call(this):
                if closure is None:
                    return None
                with torch.enable_grad():
                    return closure()  # it holds this call's backward
            before = optimizer.__class__.step.__get__(optimizer) if own is None else own
            try:
                return before(*args, **kwargs) if closure is None else before(closure, *args, **kwargs)
            finally:
                self.start_over()

        marks: dict[str, Any] = {"nbtrain_gate": self, "before": own}
        if has_schedule_mark(own):
            marks[MARK] = True
        vars(step).update(marks)
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self.gated.add(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """Before a real step: an optimizer that was made in the cell is not gated."""
        if optimizer not in self.gated:
            raise NotPrepared(
                f"--accumulate {self.every}: {type(optimizer).__name__} was made inside the cell, where nbtrain "
                "does not see its steps. Write after it is made: model, optimizer = setup(model, optimizer)"
            )

    def real_call(self, optimizer: Optimizer) -> bool:
        """Count a call of `step`. Returns whether to carry it out."""
        if self.over:
            return True
        if self.optimizer is not None and self.optimizer is not optimizer:
            raise NotSupported(
                f"--accumulate {self.every} with two optimizers: it cannot be told which gradients belong to which "
                "step. Leave the option out and call each step() every few batches yourself"
            )
        self.optimizer = optimizer
        if self.due:
            return True
        self.calls += 1
        return False

    def start_over(self) -> None:
        self.calls = 0
        self.rescaled = False

    @contextmanager
    def backward(self) -> Iterator[float]:
        """Around a backward: yields the factor of the loss."""
        with ExitStack() as stack:
            if not self.due:
                for prepared in self.prepared():
                    stack.enter_context(prepared.no_sync())
                yield 1 / self.every
                return
            calls = self.calls + 1
            if calls < self.every and self.calls and not self.rescaled and self.optimizer is not None:
                # The loader ends early: what was gathered counted 1/K, and is to count 1/calls.
                left = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
                for prepared in self.prepared():
                    own = [p for p in prepared.component.parameters() if left.pop(id(p), None) is not None]
                    prepared.rescale(own, self.every / calls)
                for p in left.values():
                    if p.grad is not None:
                        p.grad.mul_(self.every / calls)
            self.rescaled = True
            yield 1 / calls

    def _quiet(self, path: str, when: Callable[[], bool], owner: type | None = None) -> None:
        """Make this function do nothing while `when()`."""

        def make(old: Callable[..., Any]) -> Callable[..., Any]:
            def quiet(*args: Any, **kwargs: Any) -> Any:
                return None if when() else old(*args, **kwargs)

            return quiet

        self.listeners.listen(path, "accumulation", make, owner)

    def _scaler_step(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """A scaler may leave the optimizer out (infinite gradients): that call counts all the same."""

        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self.due:
                self.real_call(optimizer)
                return None
            try:
                return old(scaler, optimizer, *args, **kwargs)
            finally:
                self.start_over()

        return step


def _with_own_step(base: type) -> list[type]:
    found = [base] if "step" in vars(base) else []
    derived: type
    for derived in base.__subclasses__():
        found += _with_own_step(derived)
    return found
