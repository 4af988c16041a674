"""A look at every function of torch that is called, by a mode that may be taken off in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from nbtrain.compat.internals import Internals

its = Internals("torch")
_pop = its.name("torch.overrides._pop_mode")
_push = its.name("torch.overrides._push_mode")


def name_of(function: Any) -> str:
    """A function's name; of a property's getter the property's, of its setter that and ` =`."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        owner = getattr(function, "__self__", None)
        return str(getattr(owner, "__name__", name)) + (" =" if name == "__set__" else "")
    return name


class FunctionGuard(TorchFunctionMode):
    """While it is on, `look(function, arguments)` is called before each function of torch; what it returns, with what
    the function has returned."""

    def __init__(self, look: Callable[[Any, Any], Callable[[Any], None] | None]) -> None:
        super().__init__()
        self.look = look
        self.is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        after = self.look(func, [args, kwargs])
        result = func(*args, **(kwargs or {}))
        if after is not None:
            after(result)
        return result

    def on(self) -> None:
        if not self.is_on:
            _push(self)
            self.is_on = True

    def off(self) -> None:
        """Also where others were put on since, and are to stay: by a generator whose block is open."""
        if not self.is_on:
            return
        self.is_on = False
        others = []
        while (mode := _pop()) is not self:
            others.append(mode)
        for mode in reversed(others):
            _push(mode)
