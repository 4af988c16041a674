"""What is said of a script when it is written."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nbtrain.export.known_calls import EVERY, SEEDS, drawn_by, last_name, seeded_by
from nbtrain.export.needed_statements import Slice, Statement, statements
from nbtrain.export.rewrite_loops import TRAINS, functions
from nbtrain.export.source import Exported, Source
from nbtrain.export.strategy_code import Form

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
OF_A_BATCH = ("__getitem__", "__call__", "forward")
"""methods of data sets, transforms and models that nobody names"""
DEFINES = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def note(source: Source, history: list[Statement], found: Slice, form: Form, result: Exported) -> None:
    """`history`: all statements, in the order in which they were run."""
    notes = result.notes
    kept = {id(one) for one in found.statements}
    left_out = [one for one in history if id(one) not in kept]
    if cells := _trained_besides(source, history, left_out, found):
        listed, several = ", ".join(f"[{number}]" for number in sorted(cells)), len(cells) > 1
        notes.append(
            f"cell{'s' * several} {listed} also trained the model and {'are' if several else 'is'} not in the script: "
            "%distributed export --cell N"
        )
    models = [one for name in source.reads if isinstance(one := source.namespace.get(name), nn.Module)]
    if models and not any("torch" in one.effect.seeds for one in found.statements):
        notes.append("no seed is set: weights start with other values than in the notebook")
    modules = [part for one in models for part in one.modules()]
    if form.statistics and any(getattr(one, "running_mean", None) is not None for one in modules):
        notes.append("running statistics (batch norm) are those of rank 0, where nbtrain averages them")
    if draws := draws_apart(source, modules, found.statements):
        notes.append(f"{', '.join(draws)}: each process draws for itself, others than in the notebook")
    if source.run.pool.world_size > 1 and _seeds_in_a_loop(source):
        notes.append(
            "a seed is set in a loop: the order of batches begins anew with it on the ranks, and not in the script"
        )
    notes += [
        f"cell [{cell}] has drawn random numbers before {name}, and is not in the script: {name} starts with "
        "other values than in the notebook"
        for cell, name in _drawn_before(source, history, kept).items() if name not in result.saved
    ]  # fmt: skip


def draws_apart(source: Source, modules: list[nn.Module], found: list[Statement]) -> list[str]:
    """What each process draws numbers of its own for, or from, once the cell's first batch is there."""
    if source.run.pool.world_size == 1:
        return []
    dropout = any(isinstance(one, DROPOUT) and one.p for one in modules)
    return sorted(_libraries(source, found) | ({"dropout"} if dropout else set()))


def _libraries(source: Source, found: list[Statement]) -> set[str]:
    """Those that loops of the cell draw from, functions that it names, and what data sets and models do."""
    functions: dict[str, list[ast.AST]] = {}
    for one in ast.walk(ast.Module([one.node for one in (*found, *statements(source.number, source.cell))], [])):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.setdefault(one.name, []).append(one)
    tree = ast.parse(source.cell)
    looked_at = [node for one in OF_A_BATCH for node in functions.get(one, ())]
    looked_at += [one for one in tree.body if not isinstance(one, ast.FunctionDef | ast.ClassDef)]
    libraries: set[str] = set()
    known: set[int] = set()
    for at in looked_at:  # which grows
        before = at in tree.body and not any(isinstance(one, ast.For | ast.While) for one in ast.walk(at))
        for node in ast.walk(at):
            if isinstance(node, ast.Call) and not before:
                path, last = path_of(node.func, source.namespace), last_name(node.func)
                drops = path.startswith("torch") and "dropout" in last
                libraries.add("dropout" if drops else drawn_by(node, path, last))
            for function in functions.get(last_name(node), ()):
                if id(function) not in known:
                    known.add(id(function))
                    looked_at.append(function)
    return libraries - {""}


def _seeds_in_a_loop(source: Source) -> bool:
    loops = [one for one in ast.walk(ast.parse(source.cell)) if isinstance(one, ast.For | ast.While)]
    calls = [one.func for loop in loops for one in ast.walk(loop) if isinstance(one, ast.Call)]
    return any(
        last_name(one) in SEEDS and "torch" in seeded_by(path_of(one, source.namespace), last_name(one), False)
        for one in calls
    )


def path_of(node: ast.AST, namespace: Mapping[str, Any]) -> str:
    """`np.random.rand` → `numpy.random.rand`; empty: it is of no module."""
    if isinstance(node, ast.Attribute):
        before = path_of(node.value, namespace)
        return f"{before}.{node.attr}" if before else ""
    value = namespace.get(node.id) if isinstance(node, ast.Name) else None
    if isinstance(value, type(ast)):
        return value.__name__
    of = str(getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__)
    return f"{of}.{getattr(value, '__name__', '')}" if callable(value) and of.split(".")[0] in EVERY else ""


def _trained_besides(source: Source, history: list[Statement], left_out: list[Statement], found: Slice) -> set[int]:
    """Cells that have trained the models of the script after they were made."""
    models = {name for name in source.reads if isinstance(source.namespace.get(name), nn.Module | Optimizer)}
    never = len(source.history) + source.number
    made = max((one.cell for one in found.statements if one.binds & models), default=never)
    train, _ = functions(one.text for one in history)
    plain = {
        one.cell for one in left_out if made < one.cell and one.words & (train | TRAINS) and not _defines(one)
    }  # fmt: skip
    cells = {at for at, text in source.others.items() if made < at < source.number and models & _words(at, text)}
    return plain | cells


def _drawn_before(source: Source, history: list[Statement], kept: set[int]) -> dict[int, str]:
    """Cell that is left out, and has drawn from random numbers → what the script draws of these after it."""
    ran = [Statement(number, text, ast.Pass()) for number, text in source.others.items() if number < source.number]
    waiting: dict[str, list[int]] = {library: [] for library in EVERY}
    found: dict[int, str] = {}
    for one in sorted([*history, *ran], key=lambda one: one.cell):
        makes = not _defines(one) and any(isinstance(source.namespace.get(name), nn.Module) for name in one.binds)
        drawn = EVERY if isinstance(one.node, ast.Pass) else one.effect.draws | ({"torch"} if makes else frozenset())
        if id(one) not in kept:
            for library in drawn:
                waiting[library].append(one.cell)
            continue
        for library in one.effect.seeds:
            waiting[library].clear()
        name = next(iter(sorted(one.binds)), one.text.splitlines()[0])
        found.update(dict.fromkeys((cell for library in drawn for cell in waiting[library]), name))
    return found


def _defines(one: Statement) -> bool:
    return isinstance(one.node, DEFINES)


def _words(number: int, text: str) -> set[str]:
    try:
        return set().union(*(one.reads | one.binds for one in statements(number, text)), set())
    except SyntaxError:
        return set()
