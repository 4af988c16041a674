"""Lists what a file of this folder uses of a package's internals, and checks that the installed version has it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from nbtrain.base.errors import VersionMismatch


class Internals:
    """The internals that one file uses. Listing one costs nothing; only `check` and `name` import the package."""

    def __init__(
        self, package: str, only_if_loaded: str = "", around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`package`: as pip calls it. `only_if_loaded`: a module that must not be imported for a check. `around`: a
        context for each check."""
        self.package = package
        self._only_if_loaded = only_if_loaded
        self._around = around
        self._needs: list[Callable[[], str]] = []

    def name(self, path: str) -> Any:
        """The object at this path, or a stand-in that raises as soon as it is used: so the file can be imported, and
        checked, with any version."""
        self._needs.append(lambda: _missing(path))
        try:
            return find(path)
        except (ImportError, AttributeError):
            return Missing(f"{self.package} has no `{path}` here")

    def members(self, path: str, *names: str) -> None:
        """Require that the module or class at this path has all of these."""
        self._needs.append(lambda: _missing(path) or _lacking(path, names, hasattr))

    def fields(self, path: str, *names: str) -> None:
        """Require that objects of the class at this path have all of these: its `__init__` sets or it declares them."""
        self._needs.append(lambda: _missing(path) or _lacking(path, names, _sets))

    def takes(self, path: str, *parameters: str) -> None:
        """Require that these are the first parameters of the function at this path."""
        self._needs.append(lambda: _missing(path) or _other_parameters(path, parameters))

    def check(self) -> list[str]:
        """What the installed version lacks, in words: `FSDPState has no _lazy_init`. Empty if it fits."""
        if self._only_if_loaded and self._only_if_loaded not in sys.modules:
            return []
        with self._around():
            return [lack for need in self._needs if (lack := need())]


class Missing:
    """Stands in for what the installed version does not have."""

    def __init__(self, why: str) -> None:
        object.__setattr__(self, "_why", why)

    def __getattr__(self, name: str) -> Any:
        raise VersionMismatch(object.__getattribute__(self, "_why"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise VersionMismatch(object.__getattribute__(self, "_why"))

    __instancecheck__ = __subclasscheck__ = __enter__ = __iter__ = __contains__ = __call__


def find(path: str) -> Any:
    """The object at this dotted path. A module comes before an attribute of its package: they may differ."""
    names = path.split(".")
    known = next((n for n in range(len(names), 0, -1) if ".".join(names[:n]) in sys.modules), 0)
    at: Any = sys.modules[".".join(names[:known])] if known else import_module(names[0])
    for n in range(max(known, 1), len(names)):
        if not hasattr(at, names[n]):
            at = import_module(".".join(names[: n + 1]))
        else:
            at = getattr(at, names[n])
    return at


def _missing(path: str) -> str:
    try:
        find(path)
    except (ImportError, AttributeError):
        return f"there is no {path}"
    return ""


def _lacking(path: str, names: tuple[str, ...], has: Callable[[Any, str], bool]) -> str:
    owner = find(path)
    lacking = [name for name in names if not has(owner, name)]
    return f"{path.rpartition('.')[2]} has no {', '.join(lacking)}" if lacking else ""


def _sets(cls: type, name: str) -> bool:
    if hasattr(cls, name):
        return True
    for base in cls.__mro__:
        made = inspect.unwrap(vars(base).get("__init__", _sets))  # nbtrain may listen to it
        if name in vars(base).get("__annotations__", ()) or name in getattr(
            getattr(made, "__code__", None), "co_names", ()
        ):
            return True
    return False


def _other_parameters(path: str, parameters: tuple[str, ...]) -> str:
    function = inspect.unwrap(find(path))  # nbtrain itself may have replaced it
    code = getattr(function, "__code__", None)
    if code is None:  # of C: it cannot be asked
        return ""
    there = code.co_varnames[: len(parameters)]
    return "" if there == parameters else f"{path} takes ({', '.join(there)}), not ({', '.join(parameters)})"
