"""Tells the user, once, what cells have set in installed packages (`F.relu = mine`): it holds in one process only.

It is found in the texts of cells, and in the started patches of `unittest.mock`. What a library sets in another one is
not found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from nbtrain.base.humanize import listed
from nbtrain.compat import pickling, python
from nbtrain.exchange.local_files import local

_MAY_SET = re.compile(r"\.\s*\w+\s*(?::[^=\n]+)?[-+*/|&^%@<>]{0,2}=(?!=)|\bsetattr\b")
_FOLLOWS = frozenset((
    "torch.backends.cudnn.benchmark", "torch.backends.cudnn.deterministic", "sys.path",
))  # fmt: skip
"""Settings that are sent with each cell."""
SHOWN = 4


class PatchedPackages:
    """What the cells of one notebook have set in installed packages. The text of each cell is read once."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._read = 0
        self._seen: set[str] = set()
        self._here: dict[str, tuple[Any, str]] = {}
        """set in the notebook: `torch.nn.functional.relu` → the module or class, and the name in it"""
        self._there: set[str] = set()
        """set on the ranks"""
        self._said: set[tuple[str, bool]] = set()

    def lines(self) -> list[str]:
        """What to say before a cell, the last one typed, is sent to the ranks."""
        self._read_on()
        for holder, name in python.started_mocks():
            if (path := _path(holder, name)) is not None:
                self._here[path] = holder, name
        here = [path for path, (holder, name) in self._here.items() if _is_foreign(holder, name)]
        mine = self._new((path for path in here if path not in self._there), True)
        theirs = self._new((path for path in sorted(self._there) if path not in here), False)
        said = []
        if mine:
            said.append(
                f"{listed(mine, SHOWN)}: set in the notebook, and each process has its own: write the line in a "
                "%%distributed cell, too, and the ranks have it until they end"
            )
        if theirs:
            said.append(
                f"{listed(theirs, SHOWN)}: set on the ranks only, until they end: the notebook's stays as it is. Write "
                "the line in an ordinary cell, too, if it is to hold there"
            )
        return said

    def _new(self, paths: Iterable[str], here: bool) -> list[str]:
        new = [path for path in paths if (path, here) not in self._said]
        self._said.update((path, here) for path in new)
        return new

    def _read_on(self) -> None:
        cells = self._shell.user_ns.get("In", ())
        new = cells[self._read :] if isinstance(cells, list) else []
        self._read += len(new)
        for text in new:
            if text in self._seen or not _MAY_SET.search(text):
                continue
            self._seen.add(text)
            with suppress(SyntaxError, ValueError, RecursionError):
                self._take(text)

    def _take(self, text: str) -> None:
        tree = ast.parse(text)
        for path, holder, name in self._set_in(tree):
            self._here[path] = holder, name
        for body in _bodies(tree):
            self._there |= {path for path, _, _ in self._set_in(ast.parse(self._shell.transform_cell(body)))}

    def _set_in(self, tree: ast.AST) -> Iterator[tuple[str, Any, str]]:
        for holder, name in _targets(tree):
            value = self._value(holder)
            if (path := _path(value, name)) is not None:
                yield path, value, name

    def _value(self, node: ast.expr) -> Any:
        """What `F` or `nn.Linear` means in the notebook; properties are not asked."""
        if isinstance(node, ast.Name):
            return self._shell.user_ns.get(node.id)
        if isinstance(node, ast.Attribute):
            holder = self._value(node.value)
            return vars(holder).get(node.attr) if isinstance(holder, (ModuleType, type)) else None
        return None


def _path(holder: Any, name: str) -> str | None:
    """`torch.nn.functional.relu`; None: it is not in an installed package."""
    if not isinstance(holder, (ModuleType, type)) or not _is_installed(holder):
        return None
    where = holder.__name__ if isinstance(holder, ModuleType) else f"{holder.__module__}.{holder.__qualname__}"
    path = f"{where}.{name}"
    return None if path in _FOLLOWS else path


def _targets(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            holder, name, _ = node.args
            yield from [(holder, str(name.value))] if isinstance(name, ast.Constant) else []


def _bodies(tree: ast.AST) -> Iterator[str]:
    """Bodies of `%%distributed` cells, which IPython turns into calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "run_cell_magic":
            texts = [constant.value for constant in node.args if isinstance(constant, ast.Constant)]
            if len(texts) == 3 and texts[0] in ("distributed", "nbtrain"):
                yield str(texts[2])


def _is_installed(holder: ModuleType | type) -> bool:
    """False for the notebook's own and for local modules: these travel."""
    module = holder if isinstance(holder, ModuleType) else sys.modules.get(holder.__module__)
    if module is None or module.__name__.partition(".")[0] in ("__main__", "builtins", "nbtrain"):
        return False
    path = getattr(module, "__file__", None)
    return not (isinstance(path, str) and local(path))


def _is_foreign(holder: ModuleType | type, name: str) -> bool:
    """Whether it is not the package's own, which is there again once a patch is taken off."""
    if name not in vars(holder):
        return isinstance(holder, ModuleType) and type(holder) is not ModuleType and hasattr(type(holder), name)
    value = vars(holder)[name]
    if not callable(value) and not isinstance(value, (property, staticmethod, classmethod)):
        return True
    function = getattr(value, "__func__", getattr(value, "fget", value))
    module = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
    own = str(getattr(function, "__module__", None) or module)
    with suppress(Exception):
        return own.partition(".")[0] != module.partition(".")[0] or not (
            isinstance(holder, type) or pickling.goes_by_name(value) or not hasattr(value, "__module__")
        )
    return True
