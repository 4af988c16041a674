"""What is there once a module is imported, by whomever; imports nothing itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(module: str, begin: Callable[[], None]) -> Callable[[], None]:
    """Call `begin` once the module is there: now, or after its import. What is returned cancels that."""
    if module in sys.modules:
        begin()
        return lambda: None
    return _imports.wait(module, begin)


def before_import(module: str, do: Callable[[], None]) -> None:
    """Call `do` before the module is imported, for what it looks at; unless it is there already."""
    if module not in sys.modules:
        _imports.wait(module, do, before=True)


def if_imported(module: str, name: str) -> Any:
    """This name of the module; None where nobody has imported it yet, so that nothing can be of its making."""
    return getattr(sys.modules.get(module), name, None)


class _Imports:
    """In Python's list of finders while somebody waits. Finds nothing itself; its base would import much."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self.before: dict[str, list[Callable[[], None]]] = {}
        """what is called first; for modules that somebody waits for"""
        self.asked: set[str] = set()
        """modules that the other finders are being asked for"""

    def wait(self, module: str, begin: Callable[[], None], before: bool = False) -> Callable[[], None]:
        if not self.waiting:
            sys.meta_path.insert(0, self)
        waiting = self.waiting.setdefault(module, [])
        (self.before.setdefault(module, []) if before else waiting).append(begin)

        def end() -> None:
            if begin in self.waiting.get(module, ()):
                self.waiting[module].remove(begin)
                self._gone(module)

        return end

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting or name in self.asked:
            return None
        from importlib.util import find_spec

        self.asked.add(name)
        try:
            spec = find_spec(name)
        finally:
            self.asked.discard(name)
        if spec is not None and spec.loader is not None:
            self._tells(name, spec.loader)
        return spec

    def _tells(self, name: str, loader: Any) -> None:
        """Let the module's own loader call back once it has run the module."""
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            for do in self.before.pop(name, ()):
                do()
            run(module)
            for begin in self.waiting.pop(name, ()):
                begin()
            self._gone(name)

        loader.exec_module = exec_module

    def _gone(self, name: str) -> None:
        if not self.waiting.get(name, True) and name not in self.before:
            del self.waiting[name]
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


_imports = _Imports()
