"""Finds in the syntax which names one statement looks up and binds, and which of them whatever its values are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nbtrain.exchange.names.code_globals import CodeNames

# Parts of a node in the order they are evaluated; a kind of node that opens a scope, binds in passing, or may stand in
# the wrong place is not here: those are left to the compiler.
_PARTS: dict[type, tuple[str, ...]] = {
    ast.Expr: ("value",), ast.Assign: ("targets", "value"), ast.AugAssign: ("target", "value"),
    ast.Delete: ("targets",), ast.Assert: ("test", "msg"), ast.Raise: ("exc", "cause"), ast.Pass: (),
    ast.Attribute: ("value",), ast.Subscript: ("value", "slice"), ast.Slice: ("lower", "upper", "step"),
    ast.Call: ("func", "args", "keywords"), ast.keyword: ("value",), ast.Tuple: ("elts",), ast.List: ("elts",),
    ast.Set: ("elts",), ast.Dict: ("keys", "values"), ast.BinOp: ("left", "right"), ast.UnaryOp: ("operand",),
    ast.BoolOp: ("values",), ast.IfExp: ("test", "body", "orelse"), ast.Compare: ("left", "comparators"),
    ast.JoinedStr: ("values",), ast.FormattedValue: ("value", "format_spec"),
}  # fmt: skip
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_LAZY = tuple(getattr(ast, name) for name in ("Lambda", "TypeAlias") if hasattr(ast, name))


@dataclass(slots=True)
class StatementNames:
    """What a statement does with names."""

    found: CodeNames
    stored: set[str] = field(default_factory=set)
    """bound or deleted whatever its values are"""
    loaded: dict[str, int] = field(default_factory=dict)
    """looked up whatever its values are → line"""


def plain(root: ast.AST) -> StatementNames | None:  # noqa: C901  every cell pays for its calls
    """The names of a statement or expression without scopes of its own, as most are; ten times quicker than compiling
    it. None when the compiler has to be asked."""
    if type(root) in (ast.Import, ast.ImportFrom):
        # asked by `type`, which is quicker
        bound = frozenset(alias.asname or alias.name.partition(".")[0] for alias in root.names)  # type: ignore[attr-defined]
        return StatementNames(CodeNames(frozenset(), bound - {"*"}), set(bound - {"*"}))
    reads: set[str] = set()
    writes: set[str] = set()
    stored: set[str] = set()
    loaded: dict[str, int] = {}
    ahead: list[Any] = [root]  # no recursion: a sum of a thousand terms is a thousand levels deep
    later: list[Any] = []
    sure = True
    while True:
        while ahead:
            node = ahead.pop()
            kind = type(node)
            if kind is ast.Name:
                name = node.id
                context = type(node.ctx)
                if context is ast.Store:
                    writes.add(name)
                else:  # `del` reads: the name has to be there
                    reads.add(name)
                    if sure and name not in loaded:
                        loaded[name] = node.lineno
                if sure and context is not ast.Load:
                    stored.add(name)
                continue
            if kind is ast.Constant or node is None:
                continue
            if kind is ast.Attribute:  # these two are half of all nodes
                ahead.append(node.value)
                continue
            if kind is ast.Call:
                if node.keywords:
                    ahead += node.keywords[::-1]
                if node.args:
                    ahead += node.args[::-1]
                ahead.append(node.func)
                continue
            fields = _PARTS.get(kind)
            if fields is None:
                return None
            if sure and kind in _HALVES:
                now, rest = _HALVES[kind](node)
                later += rest
                ahead += now[::-1]
                continue
            if kind is ast.AugAssign and type(node.target) is ast.Name:
                reads.add(node.target.id)
                loaded.setdefault(node.target.id, node.target.lineno)
            for part in fields[::-1]:
                value = getattr(node, part)
                if type(value) is list:
                    ahead += value[::-1]
                else:
                    ahead.append(value)
        if not later:
            return StatementNames(CodeNames(reads, writes), stored, loaded)
        ahead, later, sure = later[::-1], [], False


_HALVES = {
    ast.BoolOp: lambda node: (node.values[:1], node.values[1:]),
    ast.IfExp: lambda node: ([node.test], [node.body, node.orelse]),
    ast.Assert: lambda node: ([node.test], [node.msg]),
    ast.Compare: lambda node: ([node.left, node.comparators[0]], node.comparators[1:]),
}
"""What is evaluated for sure, and the rest."""


def compiled(root: ast.AST, code_names: CodeNames) -> StatementNames:
    """The names of any other statement. `found`: those in its bytecode."""
    names = StatementNames(code_names)
    for name in _surely_evaluated(root):
        if isinstance(name.ctx, ast.Store):
            names.stored.add(name.id)
        else:
            names.loaded.setdefault(name.id, name.lineno)
    if isinstance(root, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names.stored.add(root.name)
        if root.name not in _evaluated_now(root):
            # a function that calls itself, a method that names its class: the new one, not the notebook's
            names.found = code_names._replace(reads=code_names.reads - {root.name})
    elif isinstance(root, ast.Delete):
        names.stored |= {target.id for target in root.targets if isinstance(target, ast.Name)}
    return names


def may_leave(node: ast.AST, how: tuple[type[ast.AST], ...]) -> bool:
    """Whether one of these statements is inside the node, functions in it included."""
    ahead: list[ast.AST] = [node]
    while ahead:
        node = ahead.pop()
        if isinstance(node, how):
            return True
        for block in _BLOCKS:
            inner = getattr(node, block, None)
            if type(inner) is list:
                ahead += inner
    return False


def _evaluated_now(node: ast.AST) -> set[str]:
    """The names looked up while a definition is made, rather than when what it defines is called."""
    names: set[str] = set()
    ahead: list[ast.AST | None] = [node]
    while ahead:
        part = ahead.pop()
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            ahead += [*part.decorator_list, *part.args.defaults, *part.args.kw_defaults]
        elif isinstance(part, ast.Lambda):
            ahead += [*part.args.defaults, *part.args.kw_defaults]
        elif part is not None:
            ahead += ast.iter_child_nodes(part)
    return names


def _surely_evaluated(root: ast.AST) -> Iterator[ast.Name]:
    """The names a statement looks up or binds whatever its values are: no bodies, no right side of `and`."""
    ahead: list[ast.AST | None] = [root]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Name):
            yield node
        elif node is not None:
            ahead += reversed(_parts(node))


def _parts(node: ast.AST) -> list[ast.AST | None]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    if isinstance(node, _LAZY):
        return [*node.args.defaults, *node.args.kw_defaults] if isinstance(node, ast.Lambda) else []
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return [node.generators[0].iter]
    if type(node) in _HALVES:
        return list(_HALVES[type(node)](node)[0])
    if isinstance(node, ast.AnnAssign):
        return [node.value, node.target] if node.value is not None else []
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        return [read, node.target, node.value]
    return list(ast.iter_child_nodes(node))
