"""Whole notebooks. While one is made it is run in one process: each statement fits what the ones before it left."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.form import form_of
from tests.fuzz.statements import statement
from tests.fuzz.values import Scene

PRELUDE = """
import abc, array, collections, contextlib, copy, dataclasses, datetime, enum, fractions, functools, math
import operator, re, types, typing, weakref
import numpy as np, torch
torch.manual_seed(0)
""".strip()

STARTS = (
    "a = np.arange(6.); b = a[2:4]; c = torch.from_numpy(a)",
    "a = torch.arange(8.); b = a.detach()[2:6]; c = [a.data.view(2, 4).T]; d = a.numpy()",
    "o = torch.nn.Linear(2, 2); p = torch.nn.Sequential(o, torch.nn.Linear(2, 2)); p[1].weight = o.weight",
    "o = torch.nn.Linear(2, 2); d = torch.optim.SGD(o.parameters(), 0.1, momentum=0.9); a = o.weight.detach()",
    "a = {'k': [1, {'n': [[2], ({3},)]}]}; b = a['k'][1]['n']; c = b[0]",
    "a = [1]; b = {'k': a}; b['self'] = b; a.append((a, b)); c = a",
    "class C:\n    __slots__ = ('left', 'right', '__weakref__')\na = C(); a.left = [a]; b = weakref.ref(a)\n"
    "c = weakref.WeakKeyDictionary({a: [a.left]})",
)
"""What chance alone hardly ever comes to: views, shared weights, deep nesting, cycles, what is held weakly."""


@dataclass(frozen=True)
class Cell:
    text: str
    distributed: bool
    fails: bool
    after: Any = field(repr=False)
    """the form of the namespace when it has run"""


@dataclass(frozen=True)
class Program:
    cells: tuple[Cell, ...]

    def __repr__(self) -> str:
        """As it would be typed."""
        return "\n".join(f"# {'%%distributed' if c.distributed else 'notebook'}\n{c.text}" for c in self.cells)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("\n" + repr(self))


class OneProcess:
    """The oracle: a namespace in which every cell runs, be it distributed or not."""

    def __init__(self) -> None:
        self.module = types.ModuleType("__main__")
        self.namespace = vars(self.module)
        self.namespace["__builtins__"] = __builtins__

    def run(self, text: str) -> BaseException | None:
        with _main(self.module), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                exec(compile(text, "<cell>", "exec", dont_inherit=True), self.namespace)
            except Exception as error:
                return error.with_traceback(None)
        return None


@contextlib.contextmanager
def _main(module: types.ModuleType) -> Iterator[None]:
    """Classes look for the module that they are made in."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before


@st.composite
def programs(draw: st.DrawFn) -> Program:
    gc.disable()  # what is held weakly, and by itself in a circle, must not be there or not by chance
    try:
        return _program(draw)
    finally:
        gc.enable()


def _program(draw: st.DrawFn) -> Program:
    oracle = OneProcess()
    oracle.run(PRELUDE)
    scene = Scene(oracle.namespace, lambda count: draw(st.integers(0, count - 1)))
    cells = [Cell(PRELUDE, False, False, form_of(oracle.namespace))]
    if scene.chance(2):
        start = scene.pick(STARTS)
        oracle.run(start)
        cells.append(Cell(start, scene.chance(3), False, form_of(oracle.namespace)))
    for _ in range(2 + scene.choose(5)):
        distributed = scene.choose(2) == 0
        fails = distributed and scene.chance(12)
        lines = [line for _ in range(1 + scene.choose(4)) if (line := _line(scene, oracle, run=not fails))]
        if fails:
            lines.append("raise ValueError('stop')")
        if lines:
            cells.append(Cell("\n".join(lines), distributed, fails, form_of(oracle.namespace)))
    return Program(tuple(cells))


def _line(scene: Scene, oracle: OneProcess, run: bool) -> str | None:
    """A statement; one that raises stands in a `try`."""
    text = statement(scene)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<cell>", "exec")
    except SyntaxError:
        return None
    if run and oracle.run(text) is not None:
        inner = text.replace("\n", "\n    ")
        return f"try:\n    {inner}\nexcept Exception: pass"
    return text
