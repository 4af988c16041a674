"""Which expressions of a text may give a DataLoader: surely, perhaps, or not. A script asks at run time of those that
perhaps do; of all others it stays as it was written."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from nbtrain.export.known_calls import CONVERTS, COPIES, PARTS

NO, PERHAPS, SURELY = range(3)
PASS_ON = frozenset(
    {"iter", "enumerate", "tqdm", "cycle", "zip", "islice", "list", "tuple", "reversed", "chain", "zip_longest",
     "resumable", "track", "progress_bar", "pairwise", "batched"}
)  # fmt: skip
"""calls that iterate what they are given as it is"""
LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "pandas", "sklearn", "scipy", "torchvision", "PIL", "einops"}
"""whose functions return no loader"""
ITEMS = frozenset({"items", "values", "keys"})
OTHERS = (PARTS | COPIES | CONVERTS | ITEMS | {"splitlines", "glob", "iterdir", "readlines", "rows"}) - {"get"}
"""methods that return no loader"""
NOT_THERE = frozenset({"forward", "__getitem__"})
"""methods where nobody iterates one that only perhaps is one"""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | Function


@dataclass(frozen=True)
class Loaders:
    """What of a notebook is one, or has one."""

    names: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    """names of dicts and lists of them"""
    attributes: frozenset[str] = frozenset()
    """attributes that hold one"""
    train: frozenset[str] = frozenset()
    """functions and methods that call backward or step, or such a function"""
    evaluate: frozenset[str] = frozenset()
    """those that switch gradients off, and do not train"""
    namespace: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    """of the cell, and of functions and classes around it"""


@dataclass(frozen=True)
class _Part:
    """A name is bound to a part of what this gives."""

    of: ast.expr


Bound = ast.expr | _Part | None
"""what a name is bound to; None: a parameter"""


class Possible:
    """Of one text."""

    def __init__(self, tree: ast.Module, loaders: Loaders) -> None:
        self.loaders = loaders
        self.outer: dict[int, Scope] = {}
        self.bound: dict[int, dict[str, list[Bound]]] = {}
        self.functions: dict[str, list[Function]] = {}
        self.attributes: dict[str, list[tuple[ast.expr, Scope]]] = {}
        self.asked: set[tuple[int, bool]] = set()
        self.trees = [tree, *map(ast.parse, loaders.texts)]
        for one in self.trees:
            self._scope(one)

    def level(self, node: ast.AST, scope: Scope) -> int:
        """Whether this expression gives a loader."""
        match node:
            case ast.Name(id=name):
                return SURELY if name in self.loaders.names else self._guarded(node, name, scope, False)
            case ast.Attribute(attr=name):
                if name in self.loaders.attributes:
                    return SURELY
                return max((self._once(value, at, False) for value, at in self.attributes.get(name, ())), default=NO)
            case ast.Subscript(value=base, slice=at):
                if isinstance(base, ast.Name) and base.id in self.loaders.holders:
                    return SURELY
                return NO if isinstance(at, ast.Slice) else self.holds(base, scope)
            case ast.Call():
                return self._called(node, scope)
            case ast.IfExp(body=one, orelse=other):
                return max(self.level(one, scope), self.level(other, scope))
            case ast.BoolOp(values=values):
                return max(self.level(one, scope) for one in values)
            case ast.NamedExpr(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self.level(value, scope)
        return NO

    def holds(self, node: ast.AST, scope: Scope) -> int:
        """Whether what is in it may be one: an item, what a loop over it gives, or a part that is unpacked."""
        found = NO
        match node:
            case ast.Name(id=name):
                found = PERHAPS if name in self.loaders.holders else self._guarded(node, name, scope, True)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                found = max((self.level(one, scope) for one in parts), default=NO)
            case ast.Dict(values=parts):
                found = max((self.level(one, scope) for one in parts), default=NO)
            case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part) | ast.DictComp(value=part):
                found = self.level(part, scope)
            case ast.Call(func=ast.Attribute(value=base, attr=name)) if name in ITEMS:
                found = self.holds(base, scope)
            case ast.Call(args=given) if _last(node) in PASS_ON:
                found = max((self.holds(one, scope) for one in given), default=NO)
            case ast.Subscript(value=base):
                found = self.holds(base, scope)
            case ast.Attribute(attr=name):
                found = max((self._once(value, at, True) for value, at in self.attributes.get(name, ())), default=NO)
            case _:
                found = self.level(node, scope) % SURELY  # of a loader these are batches
        return min(found, PERHAPS)

    def leaves(self, node: ast.AST, scope: Scope, direct: bool = True) -> Iterator[tuple[Any, int]]:
        """The expressions in an iterable that may be loaders, and whether they surely are. `direct`: it is iterated
        itself, and not what a function makes of it."""
        level = self.level(node, scope)
        if level == PERHAPS and isinstance(scope, Function) and scope.name in NOT_THERE:
            level = NO
        taken_apart = isinstance(node, ast.IfExp | ast.BoolOp | ast.NamedExpr | ast.Starred)
        named = isinstance(node, ast.Name)
        if not taken_apart and (level == SURELY or (level and (direct or named))):
            yield node, level
        if taken_apart:
            for one in ast.iter_child_nodes(node):
                yield from self.leaves(one, scope, direct)
        elif isinstance(node, ast.Call):
            yield from self._given(node, scope, direct) if level != SURELY else ()
        elif level != SURELY and not isinstance(node, ast.Attribute):
            for one in ast.iter_child_nodes(node):
                yield from self._surely(one, scope)

    def _given(self, call: ast.Call, scope: Scope, direct: bool) -> Iterator[tuple[Any, int]]:
        """Of what a function is given that may iterate it."""
        if (last := _last(call)) in ("len", "range"):
            return
        if isinstance(call.func, ast.Attribute):
            yield from self._surely(call.func.value, scope)
        unknown = (
            self.level(call, scope) == PERHAPS and last not in self.functions
        )  # those of the notebook are looked at
        for one in (*call.args, *(word.value for word in call.keywords)):
            if unknown or last in PASS_ON:
                yield from self.leaves(one, scope, direct and last in PASS_ON)
            else:
                yield from self._surely(one, scope)

    def is_parameter(self, node: ast.AST, scope: Scope) -> bool:
        return isinstance(node, ast.Name) and None in self.bound[id(scope)].get(node.id, ())

    def _surely(self, node: ast.AST, scope: Scope) -> Iterator[tuple[Any, int]]:
        return ((one, level) for one, level in self.leaves(node, scope, False) if level == SURELY)

    # --- names -----------------------------------------------------------------------------------

    def _guarded(self, node: ast.AST, name: str, scope: Scope, inside: bool) -> int:
        """Of what the name is bound to."""
        where: Scope | None = scope
        while where is not None and name not in self.bound[id(where)]:
            where = self.outer.get(id(where))
        if where is None:
            return NO
        found = NO
        for one in self.bound[id(where)][name]:
            if one is None:
                level = PERHAPS
            elif isinstance(one, _Part):
                level = self._once(one.of, where, True)
            else:
                level = self._once(one, where, inside)
            found = max(found, level)
        if isinstance(where, ast.Module) and self.loaders.namespace.get(name) is not None and found != SURELY:
            return NO  # it is there, and it is none
        return found

    def _once(self, node: ast.expr, scope: Scope, inside: bool) -> int:
        """A name may be bound to what it was bound to before."""
        key = id(node), inside
        if key in self.asked:
            return NO
        self.asked.add(key)
        try:
            return self.holds(node, scope) if inside else self.level(node, scope)
        finally:
            self.asked.discard(key)

    # --- calls -----------------------------------------------------------------------------------

    def _called(self, call: ast.Call, scope: Scope) -> int:
        last = _last(call)
        if last == "DataLoader":
            return SURELY
        value = self._value(call.func)
        if isinstance(value, type):
            return SURELY if issubclass(value, DataLoader) else NO
        if last in self.functions:
            return max(self._returned(one) for one in self.functions[last])
        if last in PASS_ON or (isinstance(call.func, ast.Name) and hasattr(builtins, last)):
            return NO
        if isinstance(call.func, ast.Attribute):
            holder = self._value(call.func.value)
            if last in OTHERS or (holder is not None and _library(type(holder)) and not inspect.ismodule(holder)):
                return NO
            if last == "get":
                return self.holds(call.func.value, scope)
        return NO if value is not None and _library(value) else PERHAPS

    def _returned(self, function: Function) -> int:
        found = NO
        for one in _inside(function):
            if isinstance(one, ast.Yield | ast.YieldFrom):
                return NO
            if isinstance(one, ast.Return) and one.value is not None:
                found = max(found, self._once(one.value, function, False), self._once(one.value, function, True))
        return found

    def _value(self, node: ast.AST) -> Any:
        """The notebook's object that this names, as far as looking runs no code of it."""
        if isinstance(node, ast.Name):
            return self.loaders.namespace.get(node.id)
        if not isinstance(node, ast.Attribute) or (holder := self._value(node.value)) is None:
            return None
        return inspect.getattr_static(holder, node.attr, None)

    # --- what is bound where ---------------------------------------------------------------------

    def _scope(self, scope: Scope, outer: Scope | None = None) -> None:
        bound: dict[str, list[Bound]] = {}
        self.bound[id(scope)] = bound
        if outer is not None:
            self.outer[id(scope)] = outer
        if not isinstance(scope, ast.Module):
            given = scope.args
            names = (*given.posonlyargs, *given.args, *given.kwonlyargs)
            bound.update({one.arg: [None] for one in names if one.arg not in ("self", "cls")})
        for node in _inside(scope):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
                self._scope(node, scope)
                if any(_last(one).endswith("property") for one in node.decorator_list):
                    returns = [one.value for one in _inside(node) if isinstance(one, ast.Return) and one.value]
                    self.attributes.setdefault(node.name, []).extend((one, node) for one in returns)
            for target, value in _bindings(node):
                self._bind(target, value, scope)

    def _bind(self, target: ast.expr, value: Bound, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                self.bound[id(scope)].setdefault(name, []).append(value)
            case ast.Attribute(attr=name) if isinstance(value, ast.expr):
                self.attributes.setdefault(name, []).append((value, scope))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                given = value.elts if isinstance(value, ast.Tuple | ast.List) else []
                whole = value.of if isinstance(value, _Part) else value
                for at, one in enumerate(parts):
                    part = given[at] if len(given) == len(parts) else _Part(whole) if whole is not None else None
                    self._bind(one, part, scope)


def _bindings(node: ast.AST) -> Iterable[tuple[ast.expr, Bound]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            return [(one, value) for one in targets]
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value) if value is not None:
            return [(target, value)]
        case ast.For(target=target, iter=iterable) | ast.comprehension(target=target, iter=iterable):
            return [(target, _Part(iterable))]
        case ast.With(items=items):
            return [(one.optional_vars, one.context_expr) for one in items if one.optional_vars is not None]
    return []


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """What is in a scope, without what is in functions in it; of classes their bodies."""
    for one in ast.iter_child_nodes(scope):
        yield one
        if not isinstance(one, Function):
            yield from _inside(one)


def _library(value: Any) -> bool:
    return str(getattr(value, "__module__", None) or "").split(".")[0] in LIBRARIES


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
