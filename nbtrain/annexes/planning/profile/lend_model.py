"""Puts stand-ins into a model while it is profiled, and restores everything that its forward changes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from nbtrain.annexes.planning.profile.memory_trace import CannotProfile
from nbtrain.compat import compiler, modules
from nbtrain.strategies.base import is_lazy
from nbtrain.worker.random_states.default_generators import capture, restore

BOXES = (dict, OrderedDict, list, set, deque)
APART = (nn.Module, torch.Tensor, type, ModuleType, FunctionType)
HELPERS = 10_000
"""objects of a model that are searched at most"""


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model, without `torch.compile`, `DataParallel` or `DistributedDataParallel` around it."""
    while True:
        inner = modules.compiled(model)
        if inner is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
            inner = modules.children(model).get("module")
        if inner is None:
            return model
        model = inner


def refuse_unprofilable(model: nn.Module) -> None:
    """Raise `CannotProfile` for what is known before running the model."""
    name = type(model).__name__
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise CannotProfile(
            f"{name} has lazy layers (LazyLinear, say), which get their sizes from a batch: call it with one batch "
            "first, as in model(x)"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise CannotProfile(f"{name} has no trainable weights, so there is nothing to plan")


@contextmanager
def stand_ins(
    model: nn.Module, others: Mapping[int, torch.Tensor], like: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """The model in training mode, with stand-ins for its tensors and without the user's hooks. `others`: the stand-ins
    of parameters and buffers, by the id of the real one; `like` makes those of tensors that are plain attributes.

    `torch.func.functional_call` would end with the forward, but recomputed layers need the stand-ins in the backward.
    """
    snapshots = [*(_Snapshot(vars(module)) for module in model.modules()), *map(_Snapshot, _helpers(model))]
    random_state = capture()
    try:
        for module in model.modules():
            held = vars(module)
            for name in modules.CALL_HOOKS:
                held[name] = OrderedDict((key, hook) for key, hook in held[name].items() if _of_torch(hook))
            if held.get(modules.COMPILED_CALL) is not None:
                held[modules.COMPILED_CALL] = None
            for box in (modules.parameters(module), modules.buffers(module)):
                box.update({name: others[id(tensor)] for name, tensor in box.items() if tensor is not None})
            held.update({name: like(value) for name, value in held.items() if isinstance(value, torch.Tensor)})
        if not model.training:
            model.train()
        with torch.inference_mode(False), torch.enable_grad(), _uncompiled(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for one in snapshots:
            one.restore()
        restore(random_state)


def _of_torch(hook: Any) -> bool:
    """True for hooks such as that of `spectral_norm`, which belong to what the model computes."""
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return str(where).split(".")[0] == "torch"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled functions run uncompiled."""
    if not compiler.is_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _helpers(model: nn.Module) -> list[dict[str, Any]]:
    """The `__dict__` of objects that modules hold and that are not modules: they may cache tensors too."""
    waiting: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    found: dict[int, dict[str, Any]] = {}
    seen: set[int] = set()
    while waiting and len(seen) < HELPERS:
        one = waiting.pop()
        if id(one) in seen or issubclass(type(one), APART):
            continue
        seen.add(id(one))
        if type(one) in BOXES or type(one) is tuple:
            if len(one) <= HELPERS:
                waiting += one.values() if isinstance(one, dict) else one
        elif type(held := attributes(one)) is dict:
            found[id(held)] = held
            waiting += held.values()
    return list(found.values())


def attributes(one: Any) -> Any:
    """The `__dict__`, without running code of the object's class."""
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:
        return None


class _Snapshot:
    """A snapshot of the attributes of one object, and of the content of its lists, dicts and sets."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held
        self._before = dict(self._held)
        self._contents = [(box, _listed(box)) for box in self._held.values() if type(box) in BOXES]

    def restore(self) -> None:
        if not _same(_listed(self._held), _listed(self._before)):
            self._held.clear()
            self._held.update(self._before)
        for box, content in self._contents:
            if not _same(_listed(box), content):
                box.clear()
                (box.extend if isinstance(box, list | deque) else box.update)(content)


def _listed(box: Any) -> list[Any]:
    return list(box.items()) if isinstance(box, dict) else list(box)


def _same(some: list[Any], others: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2:
            return a[0] is b[0] and a[1] is b[1]
        return a is b

    return len(some) == len(others) and all(map(equal, some, others))
