"""What a file of this folder uses of a package that the package does not promise, and whether it is there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from nbtrain.errors import VersionMismatch


class Internals:
    """The list of one file. To add to it costs nothing; only `check` and `name` import the package."""

    def __init__(self, package: str) -> None:
        """`package`: as pip calls it."""
        self.package = package
        self._needs: list[Callable[[], str]] = []

    def name(self, path: str) -> Any:
        """What is there under this path; where nothing is, a stand-in that says so as soon as it is used. So a file can
        be imported, and asked, whatever the version."""
        self._needs.append(lambda: _missing(path))
        try:
            return find(path)
        except (ImportError, AttributeError):
            return Missing(f"{self.package} has no `{path}` here")

    def members(self, path: str, *names: str) -> None:
        """The module or class there has all of these."""
        self._needs.append(lambda: _missing(path) or _lacking(path, names, hasattr))

    def fields(self, path: str, *names: str) -> None:
        """Objects of the class there have all of these: its `__init__` sets them, or it declares them."""
        self._needs.append(lambda: _missing(path) or _lacking(path, names, _sets))

    def takes(self, path: str, *parameters: str) -> None:
        """The first parameters of the function there."""
        self._needs.append(lambda: _missing(path) or _other_parameters(path, parameters))

    def check(self) -> list[str]:
        """What is not as this file needs it, each in words: `FSDPState has no _lazy_init`. Empty: it fits."""
        return [found for need in self._needs if (found := need())]


class Missing:
    """In the place of what the installed version does not have."""

    def __init__(self, why: str) -> None:
        object.__setattr__(self, "_why", why)

    def __getattr__(self, name: str) -> Any:
        raise VersionMismatch(object.__getattribute__(self, "_why"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise VersionMismatch(object.__getattribute__(self, "_why"))

    __instancecheck__ = __subclasscheck__ = __enter__ = __iter__ = __contains__ = __call__


def find(path: str) -> Any:
    """What is there under this dotted path. A module comes before an attribute of its package: they may differ."""
    names = path.split(".")
    known = next((n for n in range(len(names), 0, -1) if ".".join(names[:n]) in sys.modules), 0)
    found: Any = sys.modules[".".join(names[:known])] if known else import_module(names[0])
    for n in range(max(known, 1), len(names)):
        if not hasattr(found, names[n]):
            found = import_module(".".join(names[: n + 1]))
        else:
            found = getattr(found, names[n])
    return found


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
