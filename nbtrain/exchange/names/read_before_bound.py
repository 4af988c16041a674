"""Walks a cell in the order it runs and notes which names it may read before it has surely bound them.

The order comes from the syntax tree; what a single statement reads and writes comes from its bytecode. Order is
needed, or `it = iter(loader)` would capture an old `it`, which cannot even be pickled.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nbtrain.exchange.names.code_globals import CodeNames, code_names
from nbtrain.exchange.names.names_in_statement import may_leave, names_of

if TYPE_CHECKING:
    from nbtrain.exchange.names.magic_text import Magic

Settled = frozenset[str]
"""names the cell has surely bound or deleted: what the notebook has under them no longer matters"""

UNSEEN = frozenset({"exec", "globals", "locals", "vars"})
"""built-ins that can bind names nobody can see in the source"""

_SIMPLE = {ast.Expr, ast.Assign, ast.AugAssign}
_LEAVING = (ast.Raise, ast.Break, ast.Continue)
_TRY: tuple[type, ...] = tuple(getattr(ast, name) for name in ("Try", "TryStar") if hasattr(ast, name))


class NameFlow:
    """One walk over a cell; its sets hold what it found."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.deleted: set[str] = set()
        self.certain: dict[str, int] = {}
        self.opaque = False
        self._sure = True  # whether what is being walked runs for sure
        self._offset = 0  # lines before the text being walked, when it came out of a magic

    def block(self, body: Iterable[ast.stmt], settled: Settled) -> Settled | None:
        """Walk statements; returns what is settled after them, or None when control never falls through."""
        now: Settled | None = settled
        for statement in body:
            # after a `raise` nothing runs, yet it may be there for later: read it as if it ran
            now = self._statement(statement, settled if now is None else now)
            if now is None:
                self._sure = False
        return now

    def _unsure(self, body: Iterable[ast.stmt], settled: Settled) -> Settled | None:
        before, self._sure = self._sure, False
        after = self.block(body, settled)
        self._sure = before
        return after

    def _statement(self, node: ast.stmt, settled: Settled) -> Settled | None:
        if type(node) in _SIMPLE:
            return self._use(node, settled)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            after: Settled | None = self._loop(node, settled)
        elif isinstance(node, ast.If):
            after = self._branches([node.body, node.orelse], self._use(node.test, settled))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            after = self._with(node, settled)
        elif isinstance(node, _TRY):
            after = self._try(node, settled)  # type: ignore[arg-type]  # ast.TryStar is not in Python 3.10
        elif isinstance(node, ast.Match):
            after = self._match(node, settled)
        elif isinstance(node, (ast.Break, ast.Continue, ast.Pass, ast.Global)):
            return None if isinstance(node, (ast.Break, ast.Continue)) else settled
        else:
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                self.opaque = True
            after = self._use(node, settled)
            if isinstance(node, ast.Delete):
                self.deleted |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            return None if isinstance(node, ast.Raise) else after
        if self._sure:
            loop = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
            self._sure = not may_leave(node, _LEAVING[:1] if loop else _LEAVING)
        return after

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, settled: Settled) -> Settled:
        if isinstance(node, ast.While):
            settled = inside = self._use(node.test, settled)
        else:
            settled = self._use(node.iter, settled)
            inside = self._bind(node.target, settled)
        before = self._sure
        self.block(node.body, inside)
        self._sure = before
        self._unsure(node.orelse, settled)
        return settled  # the body may not run at all

    def _branches(self, bodies: Iterable[list[ast.stmt]], settled: Settled) -> Settled | None:
        return _common([self._unsure(body, settled) for body in bodies])

    def _with(self, node: ast.With | ast.AsyncWith, settled: Settled) -> Settled | None:
        before = self._sure
        for item in node.items:
            settled = self._use(item.context_expr, settled)
            if item.optional_vars is not None:
                settled = self._bind(item.optional_vars, settled)
        if any(_swallows(item.context_expr) for item in node.items):
            self._unsure(node.body, settled)
            return settled
        after = self.block(node.body, settled)
        self._sure = before
        return after

    def _try(self, node: ast.Try, settled: Settled) -> Settled | None:
        tried = self._unsure(node.body, settled)
        ways = [self._unsure(node.orelse, settled if tried is None else tried) if tried is not None else None]
        for handler in node.handlers:
            inside = settled
            if handler.type is not None:
                before, self._sure = self._sure, False
                inside = self._use(handler.type, inside)
                self._sure = before
            if handler.name:
                self.writes.add(handler.name)
                inside |= {handler.name}
            ways.append(self._unsure(handler.body, inside))
        after = _common(ways)
        # it runs from wherever the body stopped, so it cannot count on what the body bound
        finished = self._unsure(node.finalbody, settled)
        return None if after is None or finished is None else after | finished

    def _match(self, node: ast.Match, settled: Settled) -> Settled | None:
        settled = self._use(node.subject, settled)
        ways: list[Settled | None] = []
        for case in node.cases:
            bound: set[str] = set()
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.Name):
                    self.reads |= {part.id} - settled
                for name in (getattr(part, "name", None), getattr(part, "rest", None)):
                    if isinstance(name, str):
                        bound.add(name)
            self.writes |= bound
            before, self._sure = self._sure, False
            inside = settled | bound
            if case.guard is not None:
                inside = self._use(case.guard, inside)
            self._sure = before
            ways.append(self._unsure(case.body, inside))
        last = node.cases[-1]
        if last.guard is not None or not (isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None):
            ways.append(settled)  # no case matched
        return _common(ways)

    def _bind(self, target: ast.expr, settled: Settled) -> Settled:
        """`for a[i], b in …` reads a and i and binds b: as an assignment does."""
        assignment = ast.Assign(targets=[target], value=ast.copy_location(ast.Constant(None), target))
        return self._use(ast.copy_location(assignment, target), settled)

    def _use(self, node: ast.stmt | ast.expr, settled: Settled) -> Settled:
        """Note what a statement or expression without ordered blocks reads and writes; returns what is settled."""
        names = names_of(node, _compiled(node))
        used = names.found
        if self._sure:
            for name, line in names.loaded.items():
                # what the statement itself stores by := may come first
                if name in used.reads and name not in self.writes and name not in settled:
                    self.certain.setdefault(name, line + self._offset)
        if used.reads:
            self.reads |= used.reads - settled
        if used.writes:
            self.writes |= used.writes
        self.opaque = self.opaque or not UNSEEN.isdisjoint(used.reads)
        if "get_ipython" in used.reads:
            settled |= self._magics(node, settled)
        return settled | names.stored if names.stored else settled

    def _magics(self, node: ast.AST, settled: Settled) -> Settled:
        from nbtrain.exchange.names import magic_text  # few cells have magics inside

        calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
        magics = [(call, magic) for call in calls if (magic := magic_text.read(call)) is not None]
        if not magics:
            self.opaque = True  # get_ipython passed around
        for call, magic in magics:
            self.opaque |= magic.opaque
            settled = self._magic(call, magic, settled)
        return settled

    def _magic(self, call: ast.Call, magic: Magic, settled: Settled) -> Settled:
        from nbtrain.exchange.names.magic_text import parse

        writes, before, offset = set(self.writes), settled, self._offset
        for expression in magic.expressions:
            try:
                module = compile(expression, "<cell>", "eval")
            except (SyntaxError, ValueError):
                continue  # IPython leaves it as it stands: awk '{print $1}'
            self.reads |= code_names(module, module=True).reads - settled
        for text, first in magic.code:
            tree = parse(text)
            if tree is None:
                self.opaque = True
                continue
            self._offset = offset + call.lineno - 1 + first
            settled = self.block(tree.body, settled) or settled
        self._offset = offset
        if magic.isolated:
            self.writes, settled = writes, before
        self.writes |= magic.binds
        return settled | magic.binds


def _compiled(node: ast.stmt | ast.expr) -> CodeNames:
    statement = node if isinstance(node, ast.stmt) else ast.copy_location(ast.Expr(node), node)
    module = ast.Module([statement], [])
    return code_names(compile(module, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True), module=True)


def _common(ways: Iterable[Settled | None]) -> Settled | None:
    """What is settled whichever way was taken; None when no way falls through."""
    open_ways = [way for way in ways if way is not None]
    return frozenset.intersection(*open_ways) if open_ways else None


def _swallows(node: ast.expr) -> bool:
    """`with suppress(NameError):` is how notebooks delete a name that may not be there."""
    function = node.func if isinstance(node, ast.Call) else node
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"suppress", "raises", "assertRaises"}
