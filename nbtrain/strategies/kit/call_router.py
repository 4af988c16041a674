"""Routes calls of the user's own model through an engine that has to see every forward.

The object's class becomes a subclass of its own (same name, `isinstance` holds), in which `model(...)` and the public
methods that the user's classes define go through `through(name, args, kwargs)`. `unroute` gives the class back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

Through = Callable[[nn.Module, str, tuple[Any, ...], dict[str, Any]], Any]
_PLAIN = "_nbtrain_plain"
LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.")


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The user's own class, routed or not."""
    cls: type[nn.Module] = getattr(type(module), _PLAIN, type(module))
    return cls


def call_plainly(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the user's own method."""
    return getattr(plain_class(module), name)(module, *args, **kwargs)


def route(module: nn.Module, through: Through, apart: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Send the module's calls to `through`, which decides which of them to make plainly. `apart`: entered while the
    module is copied; the copy is a plain module, of no engine."""
    cls = plain_class(module)

    def method(name: str) -> Callable[..., Any]:
        def routed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return through(self, name, args, kwargs)

        routed.__name__ = name
        routed.__qualname__ = f"{cls.__qualname__}.{name}"
        return routed

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        with apart():
            return _rebuild(cls, copy.deepcopy(dict(vars(self)), memo))

    def reduce(self: nn.Module, version: int) -> Any:
        with apart():  # pickle walks over the attributes later, when the engine's are there again
            return _rebuild, (cls, copy.deepcopy(dict(vars(self))))

    body: dict[str, Any] = {name: method(name) for name in ("__call__", *_methods(cls))}
    if "zero_grad" not in body:  # what stands in for gradients of an engine cannot be zeroed; None means the same
        body["zero_grad"] = lambda self, set_to_none=True: cls.zero_grad(self, True)
    body |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _PLAIN: cls,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
    }
    module.__class__ = type(cls.__name__, (cls,), body)


def unroute(module: nn.Module) -> None:
    module.__class__ = plain_class(module)


def _methods(cls: type[nn.Module]) -> list[str]:
    """The public methods that the user wrote. Those of torch's containers (`append`) run nothing, and Lightning looks
    at each of its hooks whether it is still its own."""
    return [
        name
        for base in cls.__mro__
        if base not in nn.Module.__mro__ and not base.__module__.startswith(LIBRARIES)
        for name, value in vars(base).items()
        if callable(value)
        and not isinstance(value, staticmethod | classmethod | type)
        and not name.startswith("_")
        and name != "forward"
    ]


def _rebuild(cls: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    module = cls.__new__(cls)
    nn.Module.__setstate__(module, attributes)  # by it a cell's copies are known (worker/setup/in_cell_models.py)
    return module
