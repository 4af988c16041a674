"""Finds where in the notebook an object was made: the cell and line that bind the innermost name on the way to it."""

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
_MAGIC = re.compile(r"^([^\S\n]*)(?:%{1,2}|!|\?)", re.MULTILINE)
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
    """What a cell gives a name to, and where."""

    key: Any
    is_name: bool
    """a variable, function, class or argument; not an attribute, an item or a keyword"""
    within: str
    """`.Net.forward.` of the class and function around it, `[box]` of the variable or attribute that gets it"""
    line: int


class Cells:
    """The sources that `linecache` has of this notebook's cells, the newest first. Read only when something failed."""

    def __init__(self, numbers: Mapping[str, int], running: str = "") -> None:
        """`numbers`: file names of cells → execution numbers; older IPythons have the number in the name. `running`:
        the cell that is about to run, and has made nothing yet."""
        self._cells: list[tuple[int | None, list[str], list[_Binding]]] = []
        for name, entry in list(linecache.cache.items()):
            match = _CELL.search(name)
            if (match is None and name not in numbers) or len(entry) < 3 or name == running:
                continue
            number = numbers.get(name, int(match[1]) if match is not None and match[1] else None)
            lines = _as_typed(list(entry[2]))
            self._cells.append((number, lines, _bound("".join(lines))))
        self._cells.reverse()
        self._cells.sort(key=lambda cell: -1 if cell[0] is None else cell[0], reverse=True)

    def place(self, name: str, segments: Sequence[PathStep]) -> CellLine | None:
        """The line that made the object that `segments` lead to from the variable `name`."""
        for before, step in reversed([*zip([name, *(step.key for step in segments)], segments, strict=False)]):
            for around in _around(step, before, name):
                if place := self._find(step.key, around, False):
                    return place
        return self._find(name, "", True)

    def _find(self, key: Any, around: str, outermost: bool) -> CellLine | None:
        """`around`: the class or function that it is bound in. `outermost`: a variable of the notebook itself."""
        for number, lines, bindings in self._cells:
            for bound in reversed(bindings):
                fits = bound.is_name and "." not in bound.within if outermost else around in bound.within
                if fits and type(bound.key) is type(key) and bound.key == key and bound.line <= len(lines):
                    text = lines[bound.line - 1].strip()
                    return CellLine(number, bound.line, text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…")
        return None


def _around(step: PathStep, before: Any, name: str) -> list[str]:
    """What has to be in `_Binding.within` for a step of a path. `before`: the step before it, or the name."""
    if step.kind == "attr":
        cls = step.owner if isinstance(step.owner, type) else type(step.owner)
        return [*(f".{one.__name__}." for one in cls.__mro__ if one.__module__ == "__main__"), ""]
    if step.kind == "closure":
        return [f".{outer}." for outer in step.owner.__qualname__.split(".<locals>")[:-1][-1:]]
    if step.kind in ("item", "keyword"):
        return [f"[{before}]", f"[{name}]"]
    return [f".{step.owner.__name__}."] if step.kind == "default" else [""] if step.kind in ("class", "base") else []


def _bound(text: str) -> list[_Binding]:
    try:
        return list(_bindings(_parsed(text)))
    except RecursionError:  # of one very deep expression: a place is a help, and no cell fails for want of one
        return []


def _bindings(node: ast.AST, within: str = "") -> Iterator[_Binding]:
    """What this binds, in the order of its lines."""
    for child in ast.iter_child_nodes(node):
        line, inner = getattr(child, "lineno", 0), within
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield _Binding(name, True, within, line)
                inner = f"{within}.{name}."
            case ast.Lambda():
                inner = f"{within}.<lambda>."
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield _Binding(name, True, within, line)
            case ast.alias(name=name, asname=other):
                yield _Binding(other or name.partition(".")[0], True, within, line)
            case ast.Attribute(attr=key, ctx=ast.Store()) | ast.keyword(arg=str(key)):
                yield _Binding(key, False, within, line)
            case ast.Subscript(value=of, slice=ast.Constant(value=key), ctx=ast.Store()):
                yield _Binding(key, False, f"{within}[{_last(of)}]", line)
            case ast.Assign(targets=[target]):
                inner = f"{within}[{_last(target)}]"
            case ast.Dict(keys=keys, values=values):
                for item, value in zip(keys, values, strict=True):
                    if isinstance(item, ast.Constant):
                        yield _Binding(item.value, False, within, value.lineno)
        yield from _bindings(child, inner)


def _last(node: Any) -> Any:
    """`x` of `x`, `a.x` and `a["x"]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)):
            return name
    return ""


def _as_typed(lines: list[str]) -> list[str]:
    """The text of a cell as it was typed: of one with a magic on top IPython makes a call, with the text in it."""
    if not lines or not lines[0].startswith("get_ipython().run_cell_magic("):
        return lines
    with contextlib.suppress(SyntaxError, ValueError):
        call: Any = ast.parse("".join(lines), mode="eval").body
        name, line, body = (ast.literal_eval(argument) for argument in call.args)
        return [f"%%{name} {line}\n", *body.splitlines(keepends=True)]
    return lines


def _parsed(text: str) -> ast.Module:
    for attempt in (text, _MAGIC.sub(r"\1pass  #", text)):
        with contextlib.suppress(SyntaxError, ValueError):
            return ast.parse(attempt)
    return ast.Module([], [])
