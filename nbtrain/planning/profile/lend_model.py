"""A model is lent to a profile and comes back as it was: whatever its forward writes to itself is taken back."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from nbtrain.compat import compiler, modules
from nbtrain.planning.profile.trace import CannotProfile
from nbtrain.strategies.base import is_lazy
from nbtrain.training.ranks.default_generators import capture, restore

BOXES = (dict, OrderedDict, list, set, deque)
APART = (nn.Module, torch.Tensor, type, ModuleType, FunctionType)
HELPERS = 10_000
"""Objects of a model that are looked at, at most."""


def bare(model: nn.Module) -> nn.Module:
    """What the user wrote, out of what torch has put around it."""
    while True:
        inner = modules.compiled(model)
        if inner is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
            inner = modules.children(model).get("module")
        if inner is None:
            return model
        model = inner


def check(model: nn.Module) -> None:
    """Raise what is known beforehand."""
    name = type(model).__name__
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise CannotProfile(
            f"{name} has layers whose sizes its first batch decides (LazyLinear and the like): call it with one batch "
            "before, as in model(x)"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise CannotProfile(f"{name} has no weights that are trained, so there is nothing to plan")


@contextmanager
def lent(
    model: nn.Module, others: Mapping[int, torch.Tensor], like: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """In training, without hooks but torch's own. `others`: by the id of the model's parameter or buffer, what is there
    in its place; `like` makes what stands for a tensor that is a plain attribute.

    (`torch.func.functional_call` ends with the forward, but layers that are computed again need it in the backward.)
    """
    notebooks = [*(_Attributes(vars(module)) for module in model.modules()), *map(_Attributes, _helpers(model))]
    streams = capture()
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
        for one in notebooks:
            one.put_back()
        restore(streams)


def _of_torch(hook: Any) -> bool:
    """Such as that of `spectral_norm`, without which a model does not compute what it is to."""
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return str(where).split(".")[0] == "torch"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Functions that were compiled are run as they are written."""
    if not compiler.is_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _helpers(model: nn.Module) -> list[dict[str, Any]]:
    """Attributes of objects that modules hold and that are no modules: tables that are filled when they are needed."""
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
        elif type(held := _space(one)) is dict:
            found[id(held)] = held
            waiting += held.values()
    return list(found.values())


def _space(one: Any) -> Any:
    """Without asking the object itself."""
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:
        return None


class _Attributes:
    """Of one module, or of what helps it: what there is, and what is in its lists and dicts."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held
        self._before = dict(self._held)
        self._contents = [(box, _listed(box)) for box in self._held.values() if type(box) in BOXES]

    def put_back(self) -> None:
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
