"""Finds where in the notebook an object was made: the cell and line that assign the innermost name on the way to it."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbtrain.exchange.graph.object_path import PathStep

_CELL = re.compile(r"<ipython-input-(\d+)-|[\\/]ipykernel_\d+[\\/]")
_WIDTH = 90


@dataclass(frozen=True, slots=True)
class CellLine:
    """A line of a cell, as errors show it."""

    number: int | None
    line: int
    text: str

    def __str__(self) -> str:
        where = f"Cell In[{self.number}]" if self.number is not None else "a cell"
        return f"{where}, line {self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class _Binding:
    """One binding in a cell. `what`: its kind, where it is, and the name."""

    what: tuple[str, Any, Any]
    line: int
    value: ast.AST | None


class Cells:
    """The sources that `linecache` has of this notebook's cells, the newest first. Read only when something failed."""

    def __init__(self, numbers: Mapping[str, int], running: str = "") -> None:
        """`numbers`: file names of cells → execution numbers; older IPythons have the number in the name. `running`:
        the cell that is about to run, and has made nothing yet."""
        cells: list[tuple[int, int, list[str], int | None]] = []
        for position, (name, entry) in enumerate(list(linecache.cache.items())):
            match = _CELL.search(name)
            if (match is None and name not in numbers) or len(entry) < 3 or name == running:
                continue
            in_name = int(match[1]) if match is not None and match[1] else None
            number = numbers.get(name, in_name)
            cells.append((number if number is not None else -1, position, _as_typed(list(entry[2])), number))
        cells.sort(key=lambda cell: cell[:2], reverse=True)
        self._cells = [(number, lines) for _, _, lines, number in cells]
        self._bindings: dict[int, list[_Binding]] = {}

    def place(self, name: str, segments: Sequence[PathStep]) -> CellLine | None:
        """The line that made the object that `segments` lead to from the variable `name`."""
        for index in range(len(segments) - 1, -1, -1):
            before = segments[index - 1].key if index else name
            wanted = list(_wanted(segments[index], before))
            if wanted and (place := self._find(wanted, segments[index + 1 :])) is not None:
                return place
        return self._find([("name", None, name)], segments)

    def _find(self, wanted: list[tuple[str, Any, Any]], rest: Sequence[PathStep]) -> CellLine | None:
        for index, (number, lines) in enumerate(self._cells):
            if index not in self._bindings:
                tree = _parsed(lines)
                self._bindings[index] = list(_Scope().block(tree.body)) if tree is not None else []
            for binding in reversed(self._bindings[index]):
                if binding.what in wanted:
                    line = _refined(binding, rest)
                    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
                    return CellLine(number, line, text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…")
        return None


def _wanted(segment: PathStep, before: Any) -> Iterator[tuple[str, Any, Any]]:
    """The bindings in a cell that may have made this step of a path."""
    owner, kind, key = segment.owner, segment.kind, segment.key
    if kind == "attr":
        if isinstance(owner, type):
            yield "body", owner.__name__, key
        else:
            for cls in type(owner).__mro__:
                if cls.__module__ == "__main__":
                    yield "attr", cls.__name__, key
        yield "attr", None, key
    elif kind == "item":
        yield "item", before, key
    elif kind == "closure":
        outer = owner.__qualname__.split(".<locals>.")[:-1]
        if outer:
            yield "local", outer[-1].rpartition(".")[2], key
    elif kind == "default":
        yield "default", owner.__name__, key
    elif kind in ("class", "base"):
        yield "name", None, key


def _refined(binding: _Binding, rest: Sequence[PathStep]) -> int:
    """The line of the very element in a literal or call over several lines."""
    line, value = binding.line, binding.value
    for segment in rest:
        inner: ast.AST | None = None
        if segment.kind == "item" and isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            inner = next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == segment.key), None)
        elif segment.kind == "item" and isinstance(value, (ast.List, ast.Tuple)) and isinstance(segment.key, int):
            inner = value.elts[segment.key] if segment.key < len(value.elts) else None
        elif segment.kind in ("attr", "item", "keyword") and isinstance(value, ast.Call):
            inner = next((keyword.value for keyword in value.keywords if keyword.arg == segment.key), None)
        if inner is None:
            break
        line, value = getattr(inner, "lineno", line), inner
    return line


def _as_typed(lines: list[str]) -> list[str]:
    """The text of a cell as it was typed: of one with a magic on top IPython makes a call, with the text in it."""
    if not lines or not lines[0].startswith("get_ipython().run_cell_magic("):
        return lines
    with contextlib.suppress(SyntaxError, ValueError):
        call: Any = ast.parse("".join(lines), mode="eval").body
        name, line, body = (ast.literal_eval(argument) for argument in call.args)
        return [f"%%{name} {line}\n", *body.splitlines(keepends=True)]
    return lines


def _parsed(lines: list[str]) -> ast.Module | None:
    text = [line.rstrip("\n") for line in lines]
    at = 0
    while at < len(text) and (not text[at].strip() or text[at].lstrip().startswith("%%")):
        text[at] = ""  # the line of a magic; what stands below is Python as a rule
        at += 1
    for _ in range(2):
        with contextlib.suppress(SyntaxError, ValueError):
            return ast.parse("\n".join(text))
        for at, line in enumerate(text):
            if line.lstrip().startswith(("%", "!", "?")) or line.rstrip().endswith("?"):
                text[at] = line[: len(line) - len(line.lstrip())] + "pass"
    return None


@dataclass(frozen=True, slots=True)
class _Scope:
    """Which class and function a statement is in, and what it binds there."""

    cls: str | None = None
    function: str | None = None
    shared: frozenset[str] = frozenset()
    """names that are global in this function"""

    def named(self, name: str, line: int, value: ast.AST | None) -> _Binding:
        if self.function is not None and name not in self.shared:
            return _Binding(("local", self.function, name), line, value)
        if self.cls is not None and self.function is None:
            return _Binding(("body", self.cls, name), line, value)
        return _Binding(("name", None, name), line, value)

    def target(self, node: ast.AST, value: ast.AST | None, above: int) -> Iterator[_Binding]:
        """What an assignment to this binds; `above` is the line of the statement."""
        line = getattr(node, "lineno", above)
        if isinstance(node, ast.Name):
            yield self.named(node.id, line, value)
        elif isinstance(node, ast.Attribute):
            own = self.cls if isinstance(node.value, ast.Name) and self.function else None
            yield _Binding(("attr", own, node.attr), line, value)
        elif isinstance(node, ast.Subscript):
            container = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
            if isinstance(node.value, ast.Subscript) and isinstance(node.value.slice, ast.Constant):
                container = node.value.slice.value
            if isinstance(node.slice, ast.Constant):
                yield _Binding(("item", container, node.slice.value), line, value)
        elif isinstance(node, (ast.Tuple, ast.List)):
            values: list[Any] = [None] * len(node.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(values):
                values = list(value.elts)
            for inner, own in zip(node.elts, values, strict=True):
                yield from self.target(inner, own, above)
        elif isinstance(node, ast.Starred):
            yield from self.target(node.value, None, above)

    def bound(self, node: ast.stmt) -> Iterator[_Binding]:
        """What this statement binds by itself, without the blocks below it."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self.target(target, node.value, node.lineno)
                if isinstance(target, ast.Name) and isinstance(node.value, ast.Lambda):
                    yield from _arguments("<lambda>", node.value.args)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            yield from self.target(node.target, node.value, node.lineno)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            yield from self.target(node.target, None, node.lineno)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    yield from self.target(item.optional_vars, item.context_expr, node.lineno)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield self.named(alias.asname or alias.name.partition(".")[0], node.lineno, None)
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            words = [constant.value for constant in call.args if isinstance(constant, ast.Constant)]
            if getattr(call.func, "id", "") == "setattr" and len(call.args) == 3 and words:
                yield _Binding(("attr", None, words[0]), call.lineno, call.args[2])

    def block(self, body: list[ast.stmt]) -> Iterator[_Binding]:
        """What these statements bind, with all blocks below them."""
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield self.named(node.name, node.lineno, None)
                yield from _arguments(node.name, node.args)
                shared = frozenset(n for part in ast.walk(node) if isinstance(part, ast.Global) for n in part.names)
                yield from _Scope(self.cls, node.name, shared).block(node.body)
            elif isinstance(node, ast.ClassDef):
                yield self.named(node.name, node.lineno, None)
                yield from _Scope(node.name).block(node.body)
            else:
                yield from self._plain(node)

    def _plain(self, node: ast.stmt) -> Iterator[_Binding]:
        yield from self.bound(node)
        for part in ast.walk(node) if not isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try)) else ():
            if isinstance(part, ast.NamedExpr) and isinstance(part.target, ast.Name):
                yield self.named(part.target.id, part.lineno, part.value)
        for field in ("body", "orelse", "finalbody"):
            yield from self.block(getattr(node, field, []))
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from self.block(handler.body)


def _arguments(function: str, args: ast.arguments) -> Iterator[_Binding]:
    plain = [*args.posonlyargs, *args.args]
    for argument in (*plain, *args.kwonlyargs):
        yield _Binding(("local", function, argument.arg), argument.lineno, None)
    defaults: list[tuple[ast.arg, ast.expr | None]] = [
        *zip(plain[len(plain) - len(args.defaults) :], args.defaults, strict=True),
        *zip(args.kwonlyargs, args.kw_defaults, strict=True),
    ]
    for argument, value in defaults:
        if value is not None:
            yield _Binding(("default", function, argument.arg), value.lineno, value)
