"""Local modules on a rank: one that changed on disk since it was imported is loaded again before a cell.

Local is what lies neither in the standard library nor in site-packages. Whatever local module imported from a
changed one is loaded again too, after it. `importlib.reload` does it, so what is true of it is true here: names that
the new text does not bind stay.

What the rank holds of the old text then becomes the new, as if it had just arrived. Instances get the new class, the
notebook's classes below an old one get the new one as their base, and names, lists, dicts, attributes and closures that
hold an old function, class or enum member hold the new one. What Python does not allow (other slots, a base with
another layout) stays as it was.

Files are noted when they are read, not when a cell ends: somebody may edit one while the cell that imported it runs.
"""

from __future__ import annotations

import ast
import enum
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from types import CellType, FunctionType, ModuleType
from typing import Any

from nbtrain.base.errors import UsageError, text_of
from nbtrain.exchange.kinds.python_module_state import state_of, states
from nbtrain.exchange.local_files import Stamp, local, local_modules, note_executed, stamp
from nbtrain.exchange.python_module_baseline import kept_over

Pair = tuple[Any, Any]


@cache
def modules_at_start() -> dict[str, str]:
    """The local modules a rank starts with. Listed before it is forked: a look at a module copies its memory page."""
    return dict(local_modules())


class LocalModules:
    """Watches which local files a rank imports, and reloads those that changed."""

    def __init__(self) -> None:
        files = modules_at_start().items()
        self._files: dict[str, tuple[str, Stamp | None]] = {name: (path, stamp(path)) for name, path in files}
        self._others: dict[str, Stamp | None] = {}
        self._owed: tuple[str, ...] = ()
        """modules whose last reload failed"""
        self._again = False
        self._before: Any = SourceFileLoader.path_stats
        loader: Any = SourceFileLoader
        loader.path_stats = lambda loader, path: self._read(loader, path)
        note_executed(late=False)

    def close(self) -> None:
        loader: Any = SourceFileLoader
        loader.path_stats = self._before

    def _read(self, loader: Any, path: str) -> Any:
        """Python asks this of a file just before it reads it."""
        if local(path):
            self._files[loader.name] = path, stamp(path)
            if self._again:
                # A compiled file counts as the text's own when the second and the size are the same: not so here.
                raise OSError("read the text")
        else:
            self._others[loader.name] = stamp(path)
        return self._before(loader, path)

    def as_read(self, name: str, path: str) -> bool:
        """Whether a module that is not local was read, on this rank, from the file that is there now."""
        return name in self._others and self._others[name] == stamp(path)

    def refresh(self, namespace: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Reload changed modules; returns them, and those whose file is gone. UsageError if a reload fails."""
        loaded = sys.modules
        changed = [name for name, (path, seen) in self._files.items() if stamp(path) != seen and name in loaded]
        stale = {state.name for state in states() if state.stale} - {*changed}
        if not changed and not self._owed and not stale:
            return [], []
        importlib.invalidate_caches()
        order = _in_order({*changed, *stale, *(name for name in self._owed if name in loaded)}, self._files)
        self._owed = ()
        done: list[str] = []
        gone: list[str] = []
        replaced: list[tuple[Any, Any]] = []
        self._again = True
        try:
            for index, name in enumerate(order):
                module = loaded[name]
                before = dict(vars(module))
                state = state_of(name)
                values = kept_over(state) if state.base is not None else {}
                try:
                    importlib.reload(module)
                    state.set(values)
                    if changed or name not in stale:
                        done.append(name)
                except BaseException as error:
                    path, _ = self._files[name]
                    if isinstance(error, ModuleNotFoundError) and error.name == name and stamp(path) is None:
                        self._files[name] = path, None
                        gone.append(name)
                        continue
                    self._owed = tuple(order[index:])
                    raise UsageError(_refusal(name, path, error)) from error
                finally:
                    replaced += pairs(name, before, vars(module))
                    before.clear()
        finally:
            self._again = False
            renew(replaced, namespace)
        return done, gone


def _refusal(name: str, path: str, error: BaseException) -> str:
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"{path}, line {line}" if line is not None else path
    text = error.msg if isinstance(error, SyntaxError) else text_of(error)
    return (
        f"module {name!r} changed on disk and cannot be loaded again ({where}): {type(error).__name__}: {text}. "
        "The cell was not run; mend the file and run it again"
    )


def _in_order(changed: set[str], files: dict[str, Any]) -> list[str]:
    """The changed modules and all that import from them, each after what it imports."""
    imports = {name: _imports(name, path) & files.keys() for name, (path, _) in files.items() if name in sys.modules}
    wanted = set(changed)
    while more := {name for name, read in imports.items() if name not in wanted and read & wanted}:
        wanted |= more
    order: dict[str, None] = {}
    entered: set[str] = set()

    def enter(name: str) -> None:
        if name not in entered:
            entered.add(name)
            for other in sorted(imports.get(name, ())):
                enter(other)
            order[name] = None

    for name in files:
        if name in wanted:
            enter(name)
    return [name for name in order if name in wanted]


def _imports(name: str, path: str) -> set[str]:
    """The modules that the file reads while it is imported."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # the reload itself reports it
        return set()
    package = name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]
    names: set[str] = set()
    for node in _at_import(tree.body):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # beyond the top: the import itself will say so
                continue
            names.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    names.discard(name)
    return names


def _at_import(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _at_import(ast.iter_child_nodes(node))


# --- what a rank holds of the old text -------------------------------------------------------------


def pairs(module: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Pair]:
    """Pairs (old, new) of what this module itself defines."""
    old_and_new: list[Pair] = []
    for name, old in before.items():
        new = after.get(name)
        if getattr(old, "__module__", None) == module and old is not new:
            old_and_new += _of(old, new)
    return old_and_new


def _of(old: Any, new: Any) -> Iterator[Pair]:
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        if old.__qualname__ == new.__qualname__:
            yield old, new
    elif isinstance(old, type) and isinstance(new, type) and old.__qualname__ == new.__qualname__:
        yield old, new
        if issubclass(old, enum.Enum) and issubclass(new, enum.Enum):
            yield from ((old[name], new[name]) for name in old.__members__ if name in new.__members__)
            return
        for name, value in list(vars(old).items()):
            if isinstance(value, type) and value.__module__ == old.__module__ and name in vars(new):
                yield from _of(value, vars(new)[name])


def renew(replaced: Iterable[Pair], namespace: dict[str, Any]) -> None:
    """Replace old objects by new ones wherever the garbage collector finds a reference, and in `namespace`.

    Objects made before the rank was forked are not searched: they refer to no local module."""
    swap = {id(old): (old, new) for old, new in replaced}
    if not swap:
        return
    olds = tuple(old for old, _ in swap.values())  # as such it is passed on; of a list Python 3.13 shows a copy
    ours = {id(olds), id(swap), *map(id, swap.values())}
    _in_table(namespace, swap)
    for holder in gc.get_referrers(*olds):
        if id(holder) not in ours:
            _in_holder(holder, swap)
    for old, new in list(swap.values()):
        if isinstance(old, type) and not issubclass(old, enum.Enum):
            _rebase(old, swap)
            for instance in gc.get_referrers(old):
                if type(instance) is old:
                    with suppress(TypeError):
                        object.__setattr__(instance, "__class__", new)


def _rebase(old: type, swap: Mapping[int, Pair]) -> None:
    subclasses: list[type] = type.__subclasses__(old)
    for below in subclasses:
        if id(below) not in swap:
            with suppress(TypeError):
                below.__bases__ = tuple(swap[id(base)][1] if id(base) in swap else base for base in below.__bases__)


def _in_holder(holder: Any, swap: Mapping[int, Pair]) -> None:
    if type(holder) is dict:
        if not ("__module__" in holder and "__doc__" in holder):  # a class's own: Python keeps notes of what is in it
            _in_table(holder, swap)
    elif isinstance(holder, list):
        for index, value in enumerate(holder):
            if id(value) in swap:
                holder[index] = swap[id(value)][1]
    elif isinstance(holder, dict):
        _in_table(holder, swap)
    elif isinstance(holder, CellType):
        holder.cell_contents = swap[id(holder.cell_contents)][1]
    elif not isinstance(holder, (type, ModuleType, FunctionType)) and isinstance(
        attributes := getattr(holder, "__dict__", None), dict
    ):
        _in_table(attributes, swap)


def _in_table(table: dict[Any, Any], swap: Mapping[int, Pair]) -> None:
    for key, value in list(table.items()):
        if id(value) in swap:
            table[key] = swap[id(value)][1]
