"""How much whoever writes a strategy has to know: a number that only goes down."""

from __future__ import annotations

import ast
import inspect

from nbtrain.compat.replaced_functions import TABLE
from nbtrain.strategies import base


def members(cls: type) -> set[str]:
    """What its body defines, and what its constructor puts on an object."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found = {one.target.id for one in tree.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    found |= {one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    init = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    stored = (one for part in init for one in ast.walk(part) if isinstance(one, ast.Attribute))
    found |= {one.attr for one in stored if isinstance(one.ctx, ast.Store)}
    return {name for name in found if not name.startswith("_")}


def test_a_strategy_has_few_members() -> None:
    every = [members(cls) for cls in (base.Strategy, base.Prepared, base.Piece, base.Component)]
    assert sum(map(len, every)) <= 28, every
    mixed_in = (members(base.Shards) | members(base.HoldsModules)) - members(base.Prepared)
    assert len(mixed_in) <= 9, mixed_in


def test_few_functions_of_others_are_replaced() -> None:
    assert len(TABLE) <= 50
    assert sum(len(list(row.paths())) for row in TABLE) <= 118
