"""`--resume` of a script: a checkpoint after each epoch of the cell's outermost loop, and how to go on from it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy import ndarray
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from nbtrain.annexes.export.loop_marks import loaders_in, surely_trains
from nbtrain.annexes.export.refusals import Made
from nbtrain.annexes.export.saved_objects import trained_in
from nbtrain.annexes.export.statements import last_name, root
from nbtrain.annexes.export.text_edits import Edits
from nbtrain.base.errors import UsageError
from nbtrain.exchange.names.cell_names import analyse, reach

CODE = """
def _resumable(epochs):  # a checkpoint after each; `--resume {checkpoint}` goes on from it
    done, stateful, carried = 0, {stateful}, {carried}
    if "--resume" in sys.argv:
        found = torch.load(sys.argv[sys.argv.index("--resume") + 1], map_location="cpu", weights_only=False)
        for name in stateful:
            {load}
        globals().update(found["carried"])
        done, alike = found["done"], len(found["random"]) == _WORLD_SIZE
        _random_states(found["random"][_RANK if alike else 0])  # others draw on from where rank 0 was
        _ALIKE[:] = found["alike"] if alike else []
    for number, epoch in enumerate(epochs, 1):
        if number <= done:
            continue
        yield epoch
        found = {"done": number, "alike": _ALIKE, "random": _gathered(_random_states())}
        found["states"] = {name: {state} for name in stateful}
        found["carried"] = {name: globals()[name] for name in carried if name in globals()}
        if _RANK == 0:
            torch.save(found, "{checkpoint}.part")
            os.replace("{checkpoint}.part", "{checkpoint}")  # all of it, or the one before
"""
LOAD, STATE = 'globals()[name].load_state_dict(found["states"][name])', "globals()[name].state_dict()"
DIVIDED = """
def _state(one):
    if hasattr(one, "consolidate_state_dict"):
        one.consolidate_state_dict()
    return one.state_dict() if _RANK == 0 else None
"""
PIECES = """
_OPTIMIZERS = {optimizers}
from torch.distributed.checkpoint import state_dict as _state_dict

_COMPLETE = _state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


def _state(name):
    if name in _MODELS:
        return _weights(globals()[name])
    if name in _OPTIMIZERS:
        return _state_dict.get_optimizer_state_dict(globals()[_OPTIMIZERS[name]], globals()[name], options=_COMPLETE)
    return globals()[name].state_dict()


def _load(name, state):
    if name in _MODELS:
        _state_dict.set_model_state_dict(globals()[name], state, options=_COMPLETE)
    elif name in _OPTIMIZERS:
        _state_dict.set_optimizer_state_dict(globals()[_OPTIMIZERS[name]], globals()[name], state, options=_COMPLETE)
    else:
        globals()[name].load_state_dict(state)
"""
OF_STRATEGY: Mapping[str, tuple[str, str, str]] = {
    "single": (LOAD, STATE, ""),
    "ddp": (LOAD, STATE, ""),
    "zero1": (LOAD, "_state(globals()[name])", DIVIDED),
    "fsdp": ('_load(name, found["states"][name])', "_state(name)", PIECES),
}
"""how a state is loaded, how it is saved, and functions for that"""
FIXED = (int, float, complex, str, bytes, type(None), tuple, torch.device, torch.dtype, torch.Tensor, ndarray)
"""what a loop changes by assigning to its name, or to its items"""
MADE_ANEW = (nn.Module, Optimizer, DataLoader, Dataset, type(ast))
"""what the script's statements make as they were, or a state brings back"""


@dataclass(frozen=True)
class Resumable:
    cell: str
    code: str = ""
    notes: tuple[str, ...] = ()


def resumable(
    cell: str, texts: Iterable[str], made: Made, train: frozenset[str], namespace: dict[str, Any], strategy: str,
    checkpoint: str,
) -> Resumable:  # fmt: skip
    """The cell, whose loop over epochs saves, and what that needs. `texts`: those of functions around the cell.
    `train`: functions that train."""
    tree = ast.parse(cell)
    loops = [
        statement for statement in tree.body if isinstance(statement, ast.For) and surely_trains(statement.body, train)
    ]
    others = [statement for statement in tree.body if statement not in loops]
    if len(loops) != 1 or surely_trains(others, train) or [*loaders_in(loops[0].iter, namespace)]:
        return _without(cell, "only a cell with one outermost loop over epochs, for epoch in range(...), can go on")
    if strategy not in OF_STRATEGY:
        return _without(cell, "call model.save_checkpoint(folder) of DeepSpeed's engine in the loop")
    if strategy == "fsdp" and any(len(of) > 1 for of in made.trained.values()):
        return _without(cell, "an optimizer of several models has no state that belongs to one of them")
    reached = reach(analyse("\n".join(map(ast.unparse, loops[0].body))), namespace)
    used = {name: namespace[name] for name in (*reached.hard, *reached.soft)}
    if any(isinstance(getattr(value, "generator", value), torch.Generator) for value in used.values()):
        return _without(cell, "a torch.Generator of your own has a state that only you know of")
    carried, lost = _carried(used, reached.writes | _edited([cell, *texts]))
    stateful = sorted({*made.trained, *made.models, *(name for name, value in used.items() if _has_state(value))})
    load, state, functions = OF_STRATEGY[strategy]
    code = f"{functions}\n{CODE}".replace("{load}", load).replace("{state}", state).replace("{checkpoint}", checkpoint)
    code = code.replace("{stateful}", repr(stateful)).replace("{carried}", repr(carried))
    code = code.replace("{optimizers}", repr({name: of[0] for name, of in made.trained.items()}))
    edits = Edits(cell)
    if "resumable" in ast.unparse(loops[0].iter):
        code += "\nresumable = _resumable\n"
    else:
        edits.around(loops[0].iter, "_resumable(", ")")
    notes = tuple(f"{name} is not in the checkpoints of --resume: it cannot be saved" for name in lost)
    return Resumable(edits.text(), code, notes)


def _without(cell: str, why: str) -> Resumable:
    return Resumable(cell, notes=(f"the script has no --resume: {why}",))


def _has_state(value: Any) -> bool:
    return hasattr(value, "load_state_dict") and not isinstance(value, type | nn.Module)


def _carried(used: Mapping[str, Any], changed: frozenset[str]) -> tuple[list[str], list[str]]:
    """Names of what the loop may change and reads in its next round, and those that cannot be saved."""
    carried: list[str] = []
    lost: list[str] = []
    for name, value in sorted(used.items()):
        if callable(value) or isinstance(value, MADE_ANEW) or _has_state(value):
            continue
        if isinstance(value, FIXED) and name not in changed:
            continue
        try:
            trained = trained_in(name, value)
        except UsageError:
            lost.append(name)
        else:
            (carried if trained is None else lost).append(name)
    return carried, lost


def _edited(texts: Iterable[str]) -> frozenset[str]:
    """Names to whose objects something is assigned, as to a tensor's items, or which a method changes in place."""
    edited = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            given = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            edited |= {root(target) for target in given if isinstance(target, ast.Attribute | ast.Subscript)}
            if isinstance(node, ast.Call) and last_name(node).endswith("_"):
                edited.add(root(node))
    return frozenset(edited)
