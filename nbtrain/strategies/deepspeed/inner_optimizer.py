"""The optimizer that DeepSpeed is given, and the user's own, whose `step()` leads to it while a cell runs.

The inner one steps flat pieces by the rule of the user's, which stays out of it: its groups hold the user's
parameters all the time, schedulers and hooks see one step per step, and an optimizer that DeepSpeed would make anew
(Adagrad) keeps its groups. Before each step the groups' options are copied over.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import optimizers
from nbtrain.strategies.deepspeed.engine_layout import EngineLayout
from nbtrain.strategies.kit.per_parameter_optimizers import steps_each_alone

ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD",
}  # fmt: skip
"""Torch's that treat every element by itself, so that it does not matter how they are cut."""

OF_DEEPSPEED = {"Lion", "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion"}
"""The same of DeepSpeed's, which step by kernels of their own."""

UNTESTED = (
    "deepspeed cuts all parameters into flat pieces, which is right only if a step treats each element by itself (no "
    "norm, no row), and of {} that is not known. If it does, put {{'zero_allow_untested_optimizer': True}} into "
    "--config; otherwise take --strategy fsdp or zero1, under which it steps whole tensors"
)


class InnerOptimizer(Optimizer):
    """Made without `Optimizer.__init__`: to everybody else there is one optimizer, the user's."""

    user: Optimizer
    worker: Optimizer
    """of the user's class, over the groups and the state of this one; its other attributes are the user's"""
    sources: list[int]
    """of each group: which one of the user's it is of"""
    all_groups: list[dict[str, Any]]
    """those of `param_groups`, of which the engine leaves only one there while it steps its piece"""
    overrides: dict[str, Any]
    """options that are others here than in the user's groups"""
    layout: EngineLayout
    """of the pieces, once the engine is there"""
    apart: dict[torch.Tensor, dict[int, dict[str, Any]]]
    """the state of pieces whose parameters have not all taken the same steps: by id of the parameter"""
    missing: set[int]
    """ids of parameters that have no gradient, and that the next step leaves as they are"""

    @classmethod
    def make(cls, user: Optimizer, trainable: Callable[[torch.Tensor], bool]) -> InnerOptimizer:
        inner = cls.__new__(cls)
        worker = type(user).__new__(type(user))
        groups = []
        inner.sources = []
        for number, group in enumerate(user.param_groups):
            if trained := [*filter(trainable, group["params"])]:
                groups.append({**group, "params": trained})
                inner.sources.append(number)
        vars(inner).update(
            user=user, worker=worker, overrides={}, defaults=dict(user.defaults), param_groups=groups,
            all_groups=groups, state=defaultdict(dict), apart={}, missing=set(),
        )  # fmt: skip
        for optimizer in (inner, worker):
            optimizers.make_hook_tables(optimizer)
        optimizers.prepare_step(inner)
        return inner

    # -- its state -----------------------------------------------------------------------

    def is_apart(self, number: int) -> bool:
        return self.layout.flats[number] in self.apart

    def state_of(self, number: int, p: torch.Tensor) -> dict[str, Any]:
        """Of piece `number`, or of a parameter in it, if these are apart."""
        flat = self.layout.flats[number]
        return self.apart[flat][id(p)] if flat in self.apart else self.state[flat]

    def size(self, number: int, p: torch.Tensor) -> int:
        """How many numbers a tensor of that state has."""
        return self.layout.shares[id(p)].size if self.is_apart(number) else self.layout.size(number)

    def set_apart(self, number: int) -> dict[int, dict[str, Any]]:
        """From now on each parameter of this piece has a state of its own."""
        flat = self.layout.flats[number]
        if flat not in self.apart:
            state = self.state.pop(flat, {})
            self.apart[flat] = {
                id(p): {
                    key: self.layout.part(p, value) if is_of_all(value, flat) else copy.deepcopy(value)
                    for key, value in state.items()
                }
                for p in self.layout.members(number)
            }
        return self.apart[flat]

    def forget(self, number: int) -> None:
        self.state.pop(self.layout.flats[number], None)
        self.apart.pop(self.layout.flats[number], None)

    def made(self) -> int:
        """How many states there are."""
        return sum(map(bool, (*self.state.values(), *(entry for own in self.apart.values() for entry in own.values()))))

    # -- a step --------------------------------------------------------------------------

    def take_options(self) -> None:
        """As the user's groups have them now: a scheduler may have moved the learning rate."""
        self._take(self.param_groups)

    def _take(self, groups: list[dict[str, Any]]) -> None:
        for group, number in zip(self.all_groups, self.sources, strict=True):
            if any(group is own for own in groups):
                for name, value in self.user.param_groups[number].items():
                    if name != "params":
                        value = value.clone() if isinstance(value, torch.Tensor) else value
                        group[name] = self.overrides.get(name, value)

    def give_options(self) -> None:
        """After the engine's step: what the optimizer's has set in its groups (a count, a rate) is the user's, too."""
        for group, number in zip(self.all_groups, self.sources, strict=True):
            shown = self.user.param_groups[number]
            for name, value in group.items():
                there = shown.get(name)
                if name == "params" or name in self.overrides:
                    continue
                if isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor) and there.shape == value.shape:
                    there.copy_(value)
                else:
                    shown[name] = value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        flats_of_groups = [(group, group["params"]) for group in self.param_groups]
        lent: list[tuple[dict[int, dict[str, Any]], int, torch.Tensor]] = []
        if self.missing or self.apart:
            for group, flats in flats_of_groups:
                group["params"] = [part for flat in flats for part in self._stepped(flat, lent)]
        try:
            if groups := [group for group in self.param_groups if group["params"]]:
                self._step(groups)
        finally:
            for group, flats in flats_of_groups:
                group["params"] = flats
            for states, number, part in lent:
                states[number] = self.state.pop(part, {})

    def _stepped(self, flat: torch.Tensor, lent: list[Any]) -> list[torch.Tensor]:
        """What is stepped for a piece: it, or the parts of those parameters in it that have a gradient."""
        number = next(i for i, own in enumerate(self.layout.flats) if own is flat)
        members = self.layout.members(number)
        if flat not in self.apart and self.missing.isdisjoint(map(id, members)):
            return [flat]
        states, parts = self.set_apart(number), []
        for p in members:
            if id(p) not in self.missing:
                part = self.layout.part(p, flat.data)
                part.grad = None if flat.grad is None else self.layout.part(p, flat.grad)
                self.state[part] = states[id(p)]
                lent.append((states, id(p), part))
                parts.append(part)
        return parts

    def _step(self, groups: list[dict[str, Any]]) -> None:
        worker = self.worker
        vars(worker).update(self._attributes(self.user))
        # The engine calls it for one piece after the other, and each has all that the step says of the group.
        worker.param_groups = groups
        self._take(groups)
        worker.state = self.state
        optimizers.unhooked(type(worker))(worker)
        vars(self.user).update(self._attributes(worker))

    @staticmethod
    def _attributes(optimizer: Optimizer) -> dict[str, Any]:
        own = optimizers.without_hooks(vars(optimizer))
        return {name: value for name, value in own.items() if name not in ("param_groups", "state")}

    step.hooked = True  # type: ignore[attr-defined]  # torch looks for it on the function


def is_of_all(value: Any, flat: torch.Tensor) -> bool:
    """Whether what a state has is one number for each of the piece's."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def check_elementwise(user: Optimizer, untested: bool) -> None:
    """Refuses one of which nobody knows whether it can be cut into pieces. `untested`: the user says that it can."""
    cls = type(user)
    own = next(base.__name__ for base in cls.__mro__ if base.__module__.startswith("torch.optim"))
    known = (own in ELEMENTWISE and steps_each_alone(user)) or (
        cls.__name__ in OF_DEEPSPEED and cls.__module__.startswith("deepspeed.")
    )
    if not (known or untested):
        raise NotSupported(UNTESTED.format(cls.__name__))


def can_be_fused(user: Optimizer) -> bool:
    """Whether it is torch's Adam or AdamW, and nobody has said how it is to be computed."""
    said = ("foreach", "capturable", "differentiable")
    return type(user) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group.get("fused") is False or any(map(group.get, said)) for group in user.param_groups
    )


class OptimizerHandle:
    """Makes the user's `step()` one of the engine's while a cell runs. `put_on` and `take_off` with each cell."""

    def __init__(self, user: Optimizer, gradients: Any) -> None:
        """`gradients`: those of the engine, which takes the steps. It is not held."""
        self.user, self.gradients = user, weakref.ref(gradients)
        self.before: Any = None
        """what the user had put there"""

    def put_on(self) -> None:
        own = vars(self.user)
        older = _behind(own.get("step"))
        if older is not None:  # the cell has put something around it, which is to go on leading to the engine
            older.gradients = self.gradients
            return
        self.before = own.get("step")
        step: Any = types.MethodType(self._hooked(), self.user)
        vars(step.__func__)[optimizers.MARK] = True
        own["step"] = step

    def take_off(self) -> None:
        own = vars(self.user)
        function = getattr(own.get("step"), "__func__", None)  # else something of the cell's is around it
        whose = getattr(function, "nbtrain_of", None)
        if isinstance(whose, OptimizerHandle):
            if whose.before is None:
                del own["step"]
            else:
                own["step"] = whose.before

    def _hooked(self) -> Any:
        """With torch's hooks around it, which see one step of the user's optimizer."""

        def user_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._user_step(optimizer, *args, **kwargs)

        wrapped: Any = Optimizer.profile_hook_step(user_step)
        wrapped.nbtrain_of = self
        return wrapped

    def _user_step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        gradients = self.gradients()
        if gradients is None or not gradients.entered:  # a wrapper of a cell that is over still leads here
            return type(optimizer).step(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizers.say_stepped(optimizer)
        gradients.step()
        return loss


def _behind(step: Any) -> OptimizerHandle | None:
    """Whose step is called in the end; `--accumulate` says in `before` what it has been put around."""
    while step is not None:
        function = getattr(step, "__func__", step)
        whose = getattr(function, "nbtrain_of", None)
        if isinstance(whose, OptimizerHandle):
            return whose
        step = getattr(function, "before", None) or getattr(function, "__wrapped__", None)
    return None
