"""The optimizer that DeepSpeed is given, and the user's own, whose `step()` leads to it while a cell runs.

The inner one steps flat pieces by the rule of the user's, which stays out of it: its groups hold the user's
parameters all the time, schedulers and hooks see one step per step, and an optimizer that DeepSpeed would make anew
(Adagrad) keeps its groups. Before each step the groups' options are copied over.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nbtrain.compat import optimizers
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.lone_steps import steps_each_alone
from nbtrain.strategies.kit.rehearsed_steps import Flat, steps_alike, unhooked

ELEMENTWISE = {
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD",
}  # fmt: skip
"""Torch's that treat every element by itself, so that it does not matter how they are cut."""

OF_DEEPSPEED = {"Lion", "FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion"}
"""The same of DeepSpeed's, which step by kernels of their own."""

WHOLE = {
    "LBFGS": "takes steps along one direction for all parameters",
    "Adafactor": "keeps rows and columns of each matrix",
    "Muon": "works on each matrix as a whole",
    "SparseAdam": "needs sparse gradients",
}


class InnerOptimizer(Optimizer):
    """Made without `Optimizer.__init__`: to everybody else there is one optimizer, the user's."""

    user: Optimizer
    worker: Optimizer
    """of the user's class, over the groups and the state of this one; its other attributes are the user's"""
    sources: list[int]
    """of each group: which one of the user's it is of"""
    kernel: Callable[[InnerOptimizer], None] | None
    all_groups: list[dict[str, Any]]
    """those of `param_groups`, of which the engine leaves only one there while it steps its piece"""
    overrides: dict[str, Any]
    """options that are others here than in the user's groups"""

    @classmethod
    def make(
        cls, user: Optimizer, trainable: Callable[[torch.Tensor], bool], kind: Callable[[torch.Tensor], Any]
    ) -> InnerOptimizer:
        """`kind`: parameters of different kinds are in different groups, even if they are in one of the user's."""
        inner = cls.__new__(cls)
        worker = type(user).__new__(type(user))
        groups = []
        inner.sources = []
        for number, group in enumerate(user.param_groups):
            kinds: dict[Any, list[torch.Tensor]] = {}
            for p in filter(trainable, group["params"]):
                kinds.setdefault(kind(p), []).append(p)
            for held in kinds.values():
                groups.append({**group, "params": held})
                inner.sources.append(number)
        vars(inner).update(
            user=user, worker=worker, kernel=None, overrides={}, defaults=dict(user.defaults), param_groups=groups,
            all_groups=groups, state=defaultdict(dict),
        )  # fmt: skip
        for one in (inner, worker):
            optimizers.make_hook_tables(one)
        optimizers.prepare_step(inner)
        return inner

    def take_options(self) -> None:
        """As the user's groups have them now: a scheduler may have moved the learning rate."""
        self._take(self.param_groups)

    def _take(self, groups: list[dict[str, Any]]) -> None:
        for group, number in zip(self.all_groups, self.sources, strict=True):
            if any(group is one for one in groups):
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
        if self.kernel is not None:
            self.kernel(self)
            return
        worker = self.worker
        vars(worker).update(self._attributes(self.user))
        # The engine calls it for one piece after the other, and each has all that the step says of the group.
        worker.param_groups = [group for group in self.param_groups if group["params"]]
        self._take(worker.param_groups)
        worker.state = self.state
        unhooked(type(worker))(worker)
        vars(self.user).update(self._attributes(worker))

    @staticmethod
    def _attributes(one: Optimizer) -> dict[str, Any]:
        own = optimizers.without_hooks(vars(one))
        return {name: value for name, value in own.items() if name not in ("param_groups", "state")}

    step.hooked = True  # type: ignore[attr-defined]  # torch looks for it on the function


class CpuAdam:
    """The kernel of DeepSpeedCPUAdam, stepping what lies in the host's memory."""

    _count = 10_000  # numbers of DeepSpeed's own objects begin at zero

    def __init__(self, op: Any, decoupled: bool) -> None:
        CpuAdam._count += 1
        self.number, self.op = CpuAdam._count, op
        op.create_adam(self.number, 1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled, False)
        self.close = weakref.finalize(self, op.destroy_adam, self.number)

    @torch.no_grad()
    def __call__(self, inner: InnerOptimizer) -> None:
        for group in inner.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = inner.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                state["step"] += 1
                beta1, beta2 = group["betas"]
                self.op.adam_update(
                    self.number, int(state["step"]), float(group["lr"]), beta1, beta2, group["eps"],
                    group["weight_decay"], True, p.data, p.grad.data, state["exp_avg"], state["exp_avg_sq"],
                )  # fmt: skip


def refuse_whole(user: Optimizer) -> None:
    """Refuses those of torch's that cannot be cut into pieces."""
    for one in type(user).__mro__:
        if one.__name__ in WHOLE and one is getattr(torch.optim, one.__name__, None):
            raise NotSupported(
                f"{type(user).__name__} {WHOLE[one.__name__]}, and deepspeed steps flat pieces of them: take AdamW or "
                "SGD, or --strategy zero1"
            )


def check_elementwise(user: Optimizer) -> str:
    """Refuses one that cannot be cut into pieces; a sentence about one that nobody knows, or nothing."""
    cls = type(user)
    own = next(one.__name__ for one in cls.__mro__ if one.__module__.startswith("torch.optim"))
    if own in ELEMENTWISE and steps_each_alone(user):
        return ""
    if cls.__name__ in OF_DEEPSPEED and cls.__module__.startswith("deepspeed."):
        return ""
    if not steps_alike(user, Flat()):
        raise NotSupported(
            f"{cls.__name__} cannot be cut into deepspeed's flat pieces: tried on small tensors, it looks at more than "
            "one element at once (a norm, a row), or does something else to pieces. Write --strategy zero1, under "
            "which every rank steps whole tensors"
        )
    return (
        f"{cls.__name__} is not torch's own: tried on small tensors, it treats each element by itself, as deepspeed's "
        "flat pieces need"
    )


def adam_kind(user: Optimizer) -> bool | None:
    """For torch's Adam and AdamW without extras: whether the weight decay is decoupled. None: another optimizer."""
    if type(user) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    if any(g.get("amsgrad") or g.get("maximize") or g.get("differentiable") for g in user.param_groups):
        return None
    kinds = {bool(g.get("decoupled_weight_decay", type(user) is torch.optim.AdamW)) for g in user.param_groups}
    return kinds.pop() if len(kinds) == 1 else None


class OptimizerHandle:
    """Makes the user's `step()` one of the engine's while a cell runs, and `zero_grad()` set gradients to None.

    `put_on` and `take_off` with each cell."""

    def __init__(self, user: Optimizer, gradients: Any) -> None:
        """`gradients`: those of the engine, which takes the steps. It is not held."""
        self.user, self.gradients = user, weakref.ref(gradients)
        self.before: dict[str, Any] = {}

    def put_on(self) -> None:
        own = vars(self.user)
        self.before["zero_grad"] = own.get("zero_grad")
        own["zero_grad"] = types.MethodType(_zero_grad, self.user)
        older = _behind(own.get("step"))
        if older is not None:  # the cell has put something around it, which is to go on leading to the engine
            older.gradients = self.gradients
            return
        self.before["step"] = own.get("step")
        step: Any = types.MethodType(self._hooked(), self.user)
        vars(step.__func__)[optimizers.MARK] = True
        own["step"] = step

    def take_off(self) -> None:
        own = vars(self.user)
        if getattr(own.get("zero_grad"), "__func__", None) is _zero_grad:
            _restore(own, "zero_grad", self.before)
        function = getattr(own.get("step"), "__func__", None)  # else something of the cell's is around it
        whose = getattr(function, "nbtrain_of", None)
        if isinstance(whose, OptimizerHandle):
            _restore(own, "step", whose.before)

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


def _restore(own: dict[str, Any], name: str, before: dict[str, Any]) -> None:
    if before.get(name) is None:
        del own[name]
    else:
        own[name] = before[name]


def _behind(step: Any) -> OptimizerHandle | None:
    """Whose step is called in the end; `--accumulate` says in `before` what it has been put around."""
    while step is not None:
        function = getattr(step, "__func__", step)
        whose = getattr(function, "nbtrain_of", None)
        if isinstance(whose, OptimizerHandle):
            return whose
        step = getattr(function, "before", None) or getattr(function, "__wrapped__", None)
    return None


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Stand-ins cannot be zeroed; None means the same to the engine. Looked up now: `--accumulate` keeps it quiet."""
    type(optimizer).zero_grad(optimizer, True)
