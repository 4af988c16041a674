"""`--accumulate K`: an optimizer step every K-th call, so that K small batches make one large one.

Rules.
- Every `backward()` of a loss counts 1/K, so that a step sees the *mean* over its K calls: with a mean loss and
  batches of one size that is the gradient of the large batch. (`torch.autograd.grad` is not scaled.)
- In between, `step`, `zero_grad`, `scheduler.step`, clipping and a GradScaler do nothing, and nothing is communicated.
- A scheduler that is called once after each call of the optimizer is one for batches, and waits with it. Any other, as
  at the end of an epoch, steps in between, too.
- The last batch of a loader whose length is known ends in a step, the mean being taken over the calls there were.
  Otherwise a group goes on in the next epoch. A cell that ends in the middle of a group drops what it had gathered, and
  says so: its gradients are set to None.
- One optimizer per cell: with two, the gradients one of them discards could not be told from those to keep.
- Refused: a closure, whose backward is inside of the step; gradients that are cleared or written by hand in a group;
  `zero_grad` between a backward and its step, except in a group's first batch.

Nothing of this outlives the cell: methods of optimizers are replaced on entry and put back on leaving.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.base.errors import NotPrepared, NotSupported, UsageError
from nbtrain.compat import tensors
from nbtrain.compat.intercept import Listeners
from nbtrain.compat.optimizers import MARK, has_schedule_mark
from nbtrain.strategies.base import Prepared, Shards, multiply

CLOSURE = (
    "--accumulate {}: a closure has its backward inside of optimizer.step(), so that the batches of a group cannot be "
    "added up. Write loss.backward(); optimizer.step() in its place; for an optimizer that needs a closure, as LBFGS "
    "does, leave the option out and take larger batches"
)
CLEARED = (
    "--accumulate {}: p.grad was cleared or replaced by hand between two batches of a group, whose gradients are to be "
    "added up. Write optimizer.zero_grad() or model.zero_grad() in place of that line: these wait for the step"
)
WRITTEN = (
    "--accumulate {}: p.grad was written by hand in a batch without a backward, and only what backward() brings is "
    "added up to a mean. Write loss.backward() and optimizer.zero_grad(), or leave the option out and call step() "
    "every few batches yourself"
)
THROWN_AWAY = (
    "--accumulate {}: zero_grad() after a backward and before its step would clear this batch alone, and its gradients "
    "are added to the group's already. Ask for gradients that no step is to take by torch.autograd.grad, or leave the "
    "option out and call step() every few batches yourself"
)
LEFT_OUT = (
    "--accumulate {0}: the last {batches} of the cell made no step, and the gradients are gone: the loop ended within "
    "a group of {0}. A DataLoader with a length (len(loader)) that is read to its end makes a step of its last "
    "batches; otherwise have the loop take a number of batches that {0} divides"
)


class Accumulation:
    """Gates the optimizer of one cell."""

    def __init__(self, every: int, at_last_batch: Callable[[], bool], prepared: Callable[[], Iterable[Prepared]]):
        self.every = every
        self.at_last_batch = at_last_batch
        self.prepared = prepared
        self.calls = 0  # of `step` since the last real one
        self.taken = 0  # calls of `step` in this cell, real or not
        self.schedules: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()
        """how many of these there were when a scheduler stepped last"""
        self.in_schedule = False
        """a scheduler steps, and those that it is made of"""
        self.fresh = False
        """a backward has come since the last call of `step`"""
        self.gathered: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """(parameter, gradient, its version) after a call that was left out, until the next backward"""
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
        self.listeners.listen("torch.optim.Optimizer.zero_grad", "accumulation", self._zero_grad)
        self.listeners.listen("torch.nn.Module.zero_grad", "accumulation", self._zero_grad)
        for schedule in _with_own_step(LRScheduler):
            path = "torch.optim.lr_scheduler.LRScheduler.step"
            self.listeners.listen(path, "accumulation", self._schedule_step, schedule)
        self.listeners.listen("torch.nn.utils.clip_grads_with_norm_", "accumulation", self._clip)
        self.listeners.listen("torch.nn.utils.get_total_norm", "accumulation", self._total_norm)
        self.listeners.listen("torch.autograd.backward", "accumulation", self._backward_begins)

    def leave(self) -> list[str]:
        """After the cell. Returns what is to be told if the cell has succeeded."""
        notes = []
        self.over = True
        self.gathered = []
        if self.calls and self.optimizer is not None:
            notes = [LEFT_OUT.format(self.every, batches="batch" if self.calls == 1 else f"{self.calls} batches")]
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
        return notes

    def gate(self, optimizer: Optimizer) -> None:
        """Let only every K-th call of this optimizer's `step` through."""
        if optimizer in self.gated:
            return
        own = vars(optimizer).get("step")  # a scheduler puts its wrapper here

        def step(this: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._refuse(closure)
            if not self.real_call(this):
                return None
            before = optimizer.__class__.step.__get__(optimizer) if own is None else own
            try:
                return before(*args, **kwargs) if closure is None else before(closure, *args, **kwargs)
            finally:
                self.start_over()

        marks: dict[str, Any] = {"nbtrain_gate": self, "before": own}
        if has_schedule_mark(own):
            marks[MARK] = True
        vars(step).update(marks)
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # of this object alone
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
        self.taken += 1
        self.fresh = False
        self._check_gathered(WRITTEN)  # no backward has come since
        if self.due:
            return True
        self.calls += 1
        pairs = ((p, p.grad) for group in optimizer.param_groups for p in group["params"])
        self.gathered = [(p, grad, _version(grad)) for p, grad in pairs if grad is not None]
        return False

    def start_over(self) -> None:
        self.calls = 0
        self.rescaled = self.fresh = False

    def share(self) -> float:
        """When a backward has begun: the factor of its loss."""
        if not self.due:
            return 1 / self.every
        calls = self.calls + 1
        if calls < self.every and self.calls and not self.rescaled and self.optimizer is not None:
            # The loader ends early: what was gathered counted 1/K, and is to count 1/calls.
            left = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
            for prepared in self.prepared():
                own = [p for p in prepared.component.parameters() if left.pop(id(p), None) is not None]
                (prepared.rescale if isinstance(prepared, Shards) else multiply)(own, self.every / calls)
            multiply(left.values(), self.every / calls)
        self.rescaled = True
        return 1 / calls

    def _refuse(self, closure: Any) -> None:
        if callable(closure) and not self.over:
            raise NotSupported(CLOSURE.format(self.every))

    def _check_gathered(self, said: str) -> None:
        """Raise if gradients of this group are not what the last call that was left out had found. Strategies take
        theirs away before that call, or after a backward has begun. Clipping writes the same numbers again."""
        gathered, self.gathered = self.gathered, []
        gathered_of_trained = [entry for entry in gathered if entry[0].requires_grad]
        lost = any(p.grad is not grad for p, grad, _ in gathered_of_trained)
        written = [grad for _, grad, version in gathered_of_trained if _version(grad) != version]
        if lost or (written and (said is WRITTEN or not any(bool(grad.any()) for grad in written))):
            raise UsageError(said.format(self.every))

    def _backward_begins(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.fresh = True
            if self.gathered:
                self._check_gathered(CLEARED)
            return old(*args, **kwargs)

        return backward

    def _zero_grad(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """In a group nothing is cleared: the batch that has come last cannot be taken out of it either."""

        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.between:
                return old(owner, *args, **kwargs)
            if self.fresh and self._has_gathered(owner):
                raise NotSupported(THROWN_AWAY.format(self.every))
            return None

        return zero_grad

    def _has_gathered(self, owner: Optimizer | torch.nn.Module) -> bool:
        if self.optimizer is None or owner is self.optimizer or isinstance(owner, Optimizer):
            return owner is self.optimizer
        parameters = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return any(id(p) in parameters for p in owner.parameters())

    def _schedule_step(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """One for each batch comes once after each call of the optimizer: it is left out as that call was. One for each
        epoch comes after several, or after none if it is the same scheduler."""

        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if self.in_schedule:
                return old(schedule, *args, **kwargs)
            since = self.taken - self.schedules.get(schedule, 0)
            self.schedules[schedule] = self.taken
            if self.between and since == 1 and getattr(schedule, "last_epoch", 0) >= 0:  # else it is being made
                return None
            self.in_schedule = True
            try:
                return old(schedule, *args, **kwargs)
            finally:
                self.in_schedule = False

        return step

    def _total_norm(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.due and not isinstance(tensors, torch.Tensor):
                tensors = [tensor for tensor in tensors if tensor is not None]
            return old(tensors, *args, **kwargs)

        return total_norm

    def _clip(self, old: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: old(*args, **kwargs) if self.due else None


def _with_own_step(base: type) -> list[type]:
    classes = [base] if "step" in vars(base) else []
    derived: type
    for derived in base.__subclasses__():
        classes += _with_own_step(derived)
    return classes


def _version(grad: torch.Tensor) -> int:
    """How often it was written to. A strategy's own kinds of tensors are not asked."""
    plain = type(grad) is torch.Tensor and grad.layout is torch.strided
    return tensors.version(grad) if plain else 0
