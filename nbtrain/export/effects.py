"""What statements do when they are run: what they change, followed through names that share memory, what they seed and
draw at random, whether they write files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nbtrain.export.known_calls import (
    CONVERTS,
    COPIES,
    IN_PLACE,
    NUMBERS,
    PARTS,
    SEEDS,
    SHOWS,
    TAKES_IN,
    drawn_by,
    last_name,
    root,
    seeded_by,
    writes_file,
)  # fmt: skip

Object = tuple[str, Any]
"""one that a statement has made, or (GRAPH, one): not the object, but what gradients reach it from"""
Objects = frozenset[Object]
NONE: Objects = frozenset()
GRAPH = "graph of"


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one statement."""

    changes: frozenset[str] = frozenset()
    """names that hold a changed object"""
    changed: frozenset[str] = frozenset()
    """names that these objects were first bound to"""
    reads_first: frozenset[str] = frozenset()
    """names that are read before the statement itself binds them"""
    seeds: frozenset[str] = frozenset()
    """libraries"""
    draws: frozenset[str] = frozenset()
    """libraries; what the statement has seeded itself before is not counted"""
    binds_inside: frozenset[str] = frozenset()
    """global names that functions bind which it calls"""
    writes: bool = False
    """it writes a file itself"""
    writes_inside: bool = False
    """a function of the notebook that it calls does"""


@dataclass(slots=True)
class _Frame:
    """Names of a function that is called, of a comprehension, or of a lambda."""

    names: set[str]
    held: dict[str, Objects] = field(default_factory=dict)


class Effects(ast.NodeVisitor):
    """Follows a history, statement by statement. `still`: names whose objects nothing changes, as numbers."""

    def __init__(self, still: frozenset[str] = frozenset()) -> None:
        self.still = still
        self.held: dict[str, Objects] = {}
        self.functions: dict[str, Any] = {}
        self.methods: dict[str, list[Any]] = {}
        self.imported: dict[str, str] = {}
        self.frames: list[_Frame] = []
        self.made = 0
        self.active: list[Any] = []
        """functions whose bodies are being followed"""

    def of(self, node: ast.stmt | ast.Module) -> Effect:
        before = dict(self.held)
        self.touched: set[Object] = set()
        self.seeds: set[str] = set()
        self.draws: set[str] = set()
        self.first: set[str] = set()
        self.bound: set[str] = set()
        self.binds_inside: set[str] = set()
        self.followed = 0
        self.writes = self.writes_inside = self.uncertain = False
        self.returned = NONE
        self.visit(node)
        known = frozenset().union(*before.values())
        changed = {one for one in self.touched if one[0] != GRAPH} & known
        names = frozenset(name for name, of in before.items() if of & changed)
        return Effect(
            names, frozenset(str(name) for name, _ in changed), frozenset(self.first), frozenset(self.seeds),
            frozenset(self.draws), frozenset(self.binds_inside), self.writes, self.writes_inside,
        )  # fmt: skip

    # Statements

    def visit_FunctionDef(self, node: Any) -> None:
        for one in node.decorator_list:
            self.value(one)
        if not self.active:
            self.functions[node.name] = node
            self.imported.pop(node.name, None)
            self.held.pop(node.name, None)
        self.bound.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_FunctionDef(node)
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and not self.active:
                self.methods.setdefault(one.name, []).append(one)

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            name = one.asname or one.name.split(".")[0]
            self._imports(name, one.name if one.asname else name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for one in node.names:
            self._imports(one.asname or one.name, f"{node.module or ''}.{one.name}")

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.value(node.value, taken=False)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            values = [self.value(one) for one in node.value.elts]
            if len(values) == len(target.elts):
                for one, held in zip(target.elts, values, strict=True):
                    self.bind(one, held)
                return
        held = self.value(node.value)
        for one in node.targets:
            self.bind(one, held, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value), node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        held = self.value(node.value)
        if not isinstance(node.target, ast.Name):
            self.bind(node.target, held)
            return
        self.touched |= self._read(node.target.id)  # of a tensor or a list it is in place
        self._take_in(node.target, held if isinstance(node.op, ast.Add) else _graph(held))
        if not self._frame(node.target.id):
            self._binds(node.target.id)

    def visit_Delete(self, node: ast.Delete) -> None:
        for one in node.targets:
            if not isinstance(one, ast.Name):
                self.bind(one, NONE)
            elif not self._frame(one.id):
                self.held.pop(one.id, None)

    def visit_Return(self, node: ast.Return) -> None:
        self.returned |= self.value(node.value)

    def visit_For(self, node: Any) -> None:
        self.bind(node.target, self.value(node.iter), loop=True)
        self._body(node.body)
        self._body(node.orelse, uncertain=True)

    visit_AsyncFor = visit_For

    def visit_With(self, node: Any) -> None:
        for item in node.items:
            held = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, held)
        self._body(node.body)

    visit_AsyncWith = visit_With

    def visit_While(self, node: ast.While) -> None:
        self.value(node.test)
        self._body(node.body)
        self._body(node.orelse, uncertain=True)

    def visit_If(self, node: ast.If) -> None:
        self.value(node.test)
        self._body(node.body, uncertain=True)
        self._body(node.orelse, uncertain=True)

    def visit_Try(self, node: Any) -> None:
        for body in (node.body, *(one.body for one in node.handlers), node.orelse, node.finalbody):
            self._body(body, uncertain=True)

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> None:
        held = self.value(node.subject)
        for case in node.cases:
            for one in ast.walk(case.pattern):
                if isinstance(one, ast.MatchAs | ast.MatchStar) and one.name:
                    self._name(one.name, held)
            self._body(case.body, uncertain=True)

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)

    def _body(self, body: list[Any], uncertain: bool = False) -> None:
        """`uncertain`: it may not be run, and what it binds keeps what it was."""
        bound, was = set(self.bound), self.uncertain
        self.uncertain |= uncertain
        for one in body:
            self.visit(one)
        self.uncertain = was
        if uncertain:
            self.bound = bound

    def _imports(self, name: str, path: str) -> None:
        self.imported[name] = path
        self.functions.pop(name, None)
        self.held[name] = self._new(name)
        self.bound.add(name)

    # Names

    def bind(self, target: Any, held: Objects, value: Any = None, loop: bool = False) -> None:
        if isinstance(target, ast.Name):
            self._name(target.id, held, value, loop)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self.bind(one, held, None, loop)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, held, None, loop)
        else:
            if isinstance(target, ast.Subscript):
                self.value(target.slice)
            self.touched |= self.value(target.value)
            self._take_in(target.value, held)

    def _name(self, name: str, held: Objects, value: Any = None, loop: bool = False) -> None:
        frame = self._frame(name)
        where = frame.held if frame else self.held
        if not loop:
            held = held | self._new("" if frame else name)
        where[name] = held | where.get(name, NONE) if self.uncertain else held
        if frame:
            return
        self._binds(name)
        self.imported.pop(name, None)
        self.functions.pop(name, None)
        if isinstance(value, ast.Lambda):
            self.functions[name] = value
        elif isinstance(value, ast.Name) and value.id in self.functions:
            self.functions[name] = self.functions[value.id]

    def _binds(self, name: str) -> None:
        self.bound.add(name)
        if self.active:
            self.binds_inside.add(name)

    def _new(self, name: str) -> Objects:
        self.made += 1
        return frozenset({(name, self.made)})

    def _frame(self, name: str) -> _Frame | None:
        return next((one for one in reversed(self.frames) if name in one.names), None)

    def _read(self, name: str) -> Objects:
        if frame := self._frame(name):
            return frame.held.get(name, NONE)
        if name not in self.bound:
            self.first.add(name)
        return NONE if name in self.still else self.held.get(name, NONE)

    def _take_in(self, holder: Any, held: Objects) -> None:
        """What the holder has from now on is a part of it."""
        if (name := root(holder)) and name not in self.imported:
            where = frame.held if (frame := self._frame(name)) else self.held
            if name in where:
                where[name] |= held

    # Expressions

    def value(self, node: Any, taken: bool = True) -> Objects:
        """The objects that its value may share memory with."""
        if node is None:
            return NONE
        if isinstance(node, ast.Name):
            return self._read(node.id)
        if isinstance(node, ast.Call):
            return self._call(node, taken)
        if isinstance(node, ast.Subscript):
            self.value(node.slice)
            return self.value(node.value)
        if isinstance(node, ast.Lambda):
            self.frames.append(_Frame(set(_parameters(node))))
            drawn = set(self.seeds), set(self.draws)
            held = self.value(node.body)
            self.seeds, self.draws = drawn  # it draws when it is called
            self.frames.pop()
            return held
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, taken)
        if isinstance(node, ast.NamedExpr):
            held = self.value(node.value)
            self.bind(node.target, held)
            return held
        held = frozenset().union(*(self.value(one) for one in _expressions(node)), NONE)
        if isinstance(node, ast.Yield | ast.YieldFrom):
            self.returned |= held
        if isinstance(node, ast.Compare | ast.JoinedStr | ast.FormattedValue):
            return NONE
        if isinstance(node, ast.BinOp | ast.UnaryOp):  # new numbers; of lists, the same members
            listed = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
            return held | _graph(held) if listed else _graph(held)
        return held

    def _comprehension(self, node: Any, taken: bool) -> Objects:
        targets = {one.id for each in node.generators for one in ast.walk(each.target) if isinstance(one, ast.Name)}
        self.frames.append(_Frame(targets))
        for each in node.generators:
            self.bind(each.target, self.value(each.iter), loop=True)
            for one in each.ifs:
                self.value(one)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        held = frozenset().union(*(self.value(one, taken) for one in parts))
        self.frames.pop()
        return held

    # Calls

    def _call(self, node: ast.Call, taken: bool) -> Objects:
        func = node.func
        given = [self.value(one) for one in node.args]
        words = {word.arg: self.value(word.value) for word in node.keywords}
        every = frozenset().union(*given, *words.values())
        path = self._path(func)
        if isinstance(func, ast.Attribute) and not path:
            holder = self.value(func.value)
        else:
            holder = self.value(func)
        self._random(node, path)
        if writes_file(node, path):
            self.writes |= not self.active
            self.writes_inside |= bool(self.active)
            return every
        called = [one for one in (*node.args, *(word.value for word in node.keywords)) if isinstance(one, ast.Name)]
        drawn = set(self.seeds), set(self.draws)
        for one in called:  # map(freeze, layers), model.apply(init); a dataset calls what it is given later
            if (function := self._function(one)) and not isinstance(function, ast.ClassDef):
                self._follow(function, [every | holder] * len(_parameters(function)), {})
        self.seeds, self.draws = drawn
        last = last_name(func)
        if function := self._function(func):
            return self._follow(function, given, words)
        if path or (isinstance(func, ast.Name) and not self._is_object(func.id)):
            return self._library(node, path, last, given, words, every, holder, taken)
        if isinstance(func, ast.Attribute):
            return self._method(func, last, given, words, every, holder, taken)
        result = _graph(holder) | _only_graph(every)
        for one in self.methods.get("__call__", ()):
            result |= self._follow(one, [holder, *given], words)
        return result

    def _library(
        self, node: ast.Call, path: str, last: str, given: list[Objects], words: dict[Any, Objects], every: Objects,
        holder: Objects, taken: bool,
    ) -> Objects:  # fmt: skip
        """A function of a library, or a builtin."""
        self.touched |= words.get("out", NONE)
        if root(node.func) in SHOWS or last in SHOWS:
            return NONE
        if last in IN_PLACE or (last.endswith("_") and not last.endswith("__")):
            self.touched |= given[0] if given else every
            if node.args:
                self._take_in(node.args[0], every)
        elif not taken:
            self.touched |= every | holder
        new = last in COPIES or ".functional." in f".{path}." or (not path and last in NUMBERS)
        return _only_graph(every) if new else every

    def _method(
        self, func: ast.Attribute, last: str, given: list[Objects], words: dict[Any, Objects], every: Objects,
        holder: Objects, taken: bool,
    ) -> Objects:  # fmt: skip
        if last == "backward":
            self.touched |= {one for kind, one in holder if kind == GRAPH}
            return NONE
        result = NONE
        own = self.methods.get(last, ())
        for one in own:
            result |= self._follow(one, [holder, *given], words)
        if last in SHOWS and not own:
            return NONE
        if "inplace" not in words:
            if last in COPIES and (taken or last not in TAKES_IN):
                return result | _graph(holder)
            if last in PARTS or (last in CONVERTS and taken):
                return result | holder
        self.touched |= holder
        if not taken and last not in TAKES_IN and not last.endswith("_"):
            self.touched |= every
        if not taken or last in TAKES_IN:
            self._take_in(func.value, every)
        return result | holder | _graph(holder) | every

    def _is_object(self, name: str) -> bool:
        """Not a function of a library, and not a builtin."""
        return bool(self._frame(name)) or (name in self.held and name not in self.imported) or name in self.still

    def _function(self, func: Any) -> Any:
        """That of the notebook, if it is one."""
        if not isinstance(func, ast.Name) or self._frame(func.id):
            return None
        return self.functions.get(func.id)

    def _follow(self, function: Any, given: list[Objects], words: dict[Any, Objects]) -> Objects:
        """What its body does, with these arguments. A function that calls itself is followed once."""
        if isinstance(function, ast.ClassDef):
            made = next((one for one in function.body if getattr(one, "name", "") == "__init__"), None)
            every = frozenset().union(*given, *words.values(), NONE)
            return (self._follow(made, [NONE, *given], words) if made else NONE) | every
        self.followed += 1
        if any(one is function for one in self.active) or len(self.active) > 8 or self.followed > 200:
            return NONE
        parameters = _parameters(function)
        body = [function.body] if isinstance(function, ast.Lambda) else function.body
        shared = {one for part in body for node in ast.walk(part)
                  if isinstance(node, ast.Global | ast.Nonlocal) for one in node.names}  # fmt: skip
        own = {node.id for part in body for node in ast.walk(part)
               if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}  # fmt: skip
        frame = _Frame((own | set(parameters)) - shared)
        rest = frozenset().union(*given[len(parameters) :], *words.values(), NONE)
        for at, name in enumerate(parameters):
            several = bool(function.args.vararg or function.args.kwarg) and name in _gathered(function)
            frame.held[name] = words.get(name, given[at] if at < len(given) else NONE) | (rest if several else NONE)
        kept = self.frames, self.returned, self.uncertain, set(self.first)
        self.frames, self.returned, self.uncertain = [frame], NONE, False
        self.active.append(function)
        if isinstance(function, ast.Lambda):
            result = self.value(function.body)
        else:
            for one in body:
                self.visit(one)
            result = self.returned
        self.active.pop()
        if getattr(function, "name", "") == "__init__" and parameters:
            result |= frame.held.get(parameters[0], NONE)
        self.frames, self.returned, self.uncertain, self.first = kept
        return result

    # Random numbers

    def _path(self, func: Any) -> str:
        """`np.random.rand` → `numpy.random.rand`; empty for what is no name of a library."""
        words: list[str] = []
        while isinstance(func, ast.Attribute):
            words.append(func.attr)
            func = func.value
        if not isinstance(func, ast.Name) or func.id not in self.imported or self._frame(func.id):
            return ""
        return ".".join([self.imported[func.id], *reversed(words)])

    def _random(self, node: ast.Call, path: str) -> None:
        last = last_name(node.func) if not path else path.rsplit(".", 1)[-1]
        if last in SEEDS and not self._function(node.func):
            self.seeds |= seeded_by(path, last, isinstance(node.func, ast.Name))
        elif (library := drawn_by(node, path, last)) and library not in self.seeds:
            self.draws.add(library)


def _graph(held: Objects) -> Objects:
    return frozenset(one if one[0] == GRAPH else (GRAPH, one) for one in held)


def _only_graph(held: Objects) -> Objects:
    return frozenset(one for one in held if one[0] == GRAPH)


def _expressions(node: ast.AST) -> Iterator[Any]:
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.expr):
            yield one
        elif isinstance(one, ast.keyword | ast.FormattedValue):
            yield one.value


def _parameters(function: Any) -> list[str]:
    of = function.args
    return [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg) if one]


def _gathered(function: Any) -> Iterable[str]:
    return [one.arg for one in (function.args.vararg, function.args.kwarg) if one]
