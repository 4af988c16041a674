"""Packages that a cell uses and that another machine has in another version, or not at all.

Torch and what objects are made of on their way are compared when a machine joins (`engines/remote/machines.py`); the
others when a cell first uses them: what it reads of them in the notebook, and what it imports itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from types import ModuleType
from typing import Any

from nbtrain.base.installed_files import installed_versions, plain_name
from nbtrain.engines.remote.machines import COMPARED, Machine


class OtherVersions:
    """What was said of them, so that it is said once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, ...]] = set()
        self._packages: Mapping[str, list[str]] = {}
        """module → packages that have it"""
        self._here: Mapping[str, str] = {}
        """plain name of each package that is installed here → version"""
        self._unknown: set[str] = set()
        """modules that are in no package"""

    def lines(self, values: Iterable[Any], code: str, machines: Iterable[Machine]) -> list[str]:
        """Sentences for what has not been said yet. `values`: of the names that the cell reads."""
        wanted: dict[str, str] = {}
        for module in {*_held(values), *_imported(code)} - sys.stdlib_module_names:
            for package in self._of(module):
                if package not in COMPARED and (version := self._here.get(plain_name(package))):
                    wanted[package] = version
        lines = []
        for machine in machines:
            there = {package: machine.packages.get(plain_name(package), "") for package in wanted}
            news = {(machine.name, name, there[name]): name for name in sorted(wanted) if there[name] != wanted[name]}
            if other := [name for told, name in news.items() if told not in self._told]:
                self._told.update(news)
                has = ", ".join(f"{name} {there[name]}" if there[name] else f"no {name}" for name in other)
                here = ", ".join(f"{name} {wanted[name]}" for name in other)
                lines.append(
                    f"{machine.name} has {has}, and the notebook {here}: install the same there, or the cell may "
                    "behave differently on its ranks"
                )
        return lines

    def _of(self, module: str) -> list[str]:
        if module not in self._packages and module not in self._unknown:
            self._packages, self._here = metadata.packages_distributions(), installed_versions()
            if module not in self._packages:
                self._unknown.add(module)
        return self._packages.get(module, [])


def _held(values: Iterable[Any]) -> Iterator[str]:
    """Modules that the notebook's names are of, or whose classes and functions they are."""
    for value in values:
        name = None
        with suppress(Exception):  # its class is the user's
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            yield name.partition(".")[0]


def _imported(code: str) -> Iterator[str]:
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)) if "import" in code else ():
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]
