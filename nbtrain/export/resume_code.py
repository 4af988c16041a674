"""`--resume` of a script: a checkpoint after each epoch of the cell's outermost loop, and how to go on from it."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbtrain.export.definitions import Made
from nbtrain.export.known_calls import SHOWS, root
from nbtrain.export.possible_loaders import Loaders, Possible
from nbtrain.export.rewrite_loops import surely_trains
from nbtrain.export.text_edits import Edits

CODE = '''
CHECKPOINT = {checkpoint!r}
OPTIMIZERS = {optimizers!r}
"""optimizer: its model"""
STATEFUL = {stateful!r}
"""what has a state_dict, as schedules"""
VALUES = {values!r}
"""what the loop takes from one epoch to the next"""


def resumable(epochs):
    """A checkpoint after each epoch; with `--resume {checkpoint}` from the one after that which it was saved in."""
    done = load_checkpoint(sys.argv[sys.argv.index("--resume") + 1]) if "--resume" in sys.argv else 0
    for number, epoch in enumerate(epochs, 1):
        if number > done:
            yield epoch
            save_checkpoint(number)


def save_checkpoint(done):
    own = {{"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}}
    if DEVICE.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state()
    states = [own] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(states, own)
    found = {{
        "done": done, "states": states, "shared": SHARED[0],
        "weights": {{name: weights(globals()[name]) for name in MODELS}},
        "optimizers": {{name: optimizer_state(globals()[name], globals()[of]) for name, of in OPTIMIZERS.items()}},
        "stateful": {{name: globals()[name].state_dict() for name in STATEFUL}},
        "values": {{name: globals()[name] for name in VALUES if name in globals()}},
    }}
    if RANK == 0:
        torch.save(found, CHECKPOINT + ".part")
        os.replace(CHECKPOINT + ".part", CHECKPOINT)  # all of it, or the one before


def load_checkpoint(path):
    apart()
    found = torch.load(path, map_location="cpu", weights_only=False)
    for name in MODELS:
        load_weights(globals()[name], found["weights"][name])
    for name, of in OPTIMIZERS.items():
        load_optimizer(globals()[name], globals()[of], found["optimizers"][name])
    for name in STATEFUL:
        globals()[name].load_state_dict(found["stateful"][name])
    globals().update(found["values"])
    SHARED[0] = found["shared"]
    if len(found["states"]) == WORLD_SIZE:  # with another number of processes each draws on from where it is
        own = found["states"][RANK]
        torch.set_rng_state(own["torch"])
        random.setstate(own["python"])
        numpy.random.set_state(own["numpy"])
        if DEVICE.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"])
    return found["done"]
'''
PLAIN = """
def load_weights(model, state):
    model.load_state_dict(state)


def optimizer_state(optimizer, model):
    {consolidate}return optimizer.state_dict()


def load_optimizer(optimizer, model, state):
    optimizer.load_state_dict(state)
"""
CONSOLIDATE = """if WORLD_SIZE > 1:
        optimizer.consolidate_state_dict()
        if RANK:
            return None
    """
PIECES = """
def load_weights(model, state):
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def optimizer_state(optimizer, model):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(model, optimizer, options=options)


def load_optimizer(optimizer, model, state):
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
"""
OF_PIECES = """from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict,
)"""
ENGINE = """
def load_weights(model, state):
    if not isinstance(model, deepspeed.DeepSpeedEngine):
        model.load_state_dict(state)


def optimizer_state(optimizer, model):
    folder, latest = CHECKPOINT + ".engine", os.path.join(CHECKPOINT + ".engine", "latest")
    before = open(latest).read() if os.path.exists(latest) else ""
    tag = "even" if before == "odd" else "odd"  # the one before stays until all of this one is there
    model.save_checkpoint(folder, tag=tag)
    return folder, tag


def load_optimizer(optimizer, model, state):
    model.load_checkpoint(*state)
"""
OF_STRATEGY = {
    "single": ("", PLAIN.replace("{consolidate}", "")),
    "ddp": ("", PLAIN.replace("{consolidate}", "")),
    "zero1": ("", PLAIN.replace("{consolidate}", CONSOLIDATE)),
    "fsdp": (OF_PIECES, PIECES),
    "deepspeed": ("", ENGINE),
}
"""imports, functions"""
DATA = (int, float, str, bool, type(None), list, dict, tuple, set)


@dataclass(frozen=True)
class Resumable:
    cell: str
    imports: str = ""
    code: str = ""
    notes: tuple[str, ...] = ()


def resumable(
    cell: str, made: Made, loaders: Loaders, texts: Iterable[str], namespace: Mapping[str, Any], bound: set[str],
    strategy: str, accumulates: bool, checkpoint: str,
) -> Resumable:  # fmt: skip
    """The cell, whose loop over epochs saves, and what that needs. `texts`: of the functions around it."""
    trained = {name: made.trained_by(name) for name in made.optimizers}
    if not any(trained.values()):
        return Resumable(cell)
    tree = ast.parse(cell)
    loops = [one for one in tree.body if isinstance(one, ast.For) and surely_trains(one.body, loaders.train)]
    others = [one for one in tree.body if one not in loops]
    if (
        len(loops) != 1
        or surely_trains(others, loaders.train)
        or [*Possible(tree, loaders).leaves(loops[0].iter, tree)]
    ):
        return _without(cell, "only a cell with one outermost loop over epochs, for epoch in range(...), can go on")
    if accumulates and any(isinstance(one, ast.Break) for one in ast.walk(loops[0])):
        return _without(cell, "a break may leave gradients that wait for their step")
    if strategy in ("fsdp", "deepspeed") and any(len(of) > 1 for of in trained.values()):
        return _without(cell, "an optimizer of several models has no state that belongs to one of them")
    bound = bound | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    generators = [name for name, value in namespace.items() if isinstance(value, torch.Generator)]
    drawn = [n for n, one in namespace.items() if isinstance(one, DataLoader) and one.generator is not None]
    if {*generators, *drawn} & bound:
        return _without(cell, "a torch.Generator of your own has a state that only you know of")
    values, lost = _carried(loops[0], texts, namespace, bound)
    stateful = [
        name for name, value in namespace.items()
        if name in bound and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        and not isinstance(value, nn.Module | Optimizer | type)
    ]  # fmt: skip
    imports, functions = OF_STRATEGY[strategy]
    code = CODE.format(
        checkpoint=checkpoint, optimizers={name: of[0] for name, of in trained.items() if of}, stateful=stateful,
        values=[name for name in values if name not in stateful],
    )  # fmt: skip
    edits = Edits(cell)
    if "resumable" not in ast.unparse(loops[0].iter):
        edits.around(loops[0].iter, "resumable(", ")")
    notes = tuple(f"{name} is not in the checkpoints of --resume: it cannot be saved" for name in lost)
    imports = "\n".join(filter(None, ("import random", "import numpy", imports)))
    return Resumable(edits.text(), imports, functions.strip() + "\n\n\n" + code.strip(), notes)


def _without(cell: str, why: str) -> Resumable:
    return Resumable(cell, notes=(f"the script has no --resume: {why}",))


def _carried(
    loop: ast.For, texts: Iterable[str], namespace: Mapping[str, Any], before: set[str]
) -> tuple[list[str], list[str]]:
    """Names of what the loop may change and needs in its next round, and those that cannot be saved."""
    bound, changed = _touched(loop.body)
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [one for one in ast.walk(node) if isinstance(one, ast.Global)]
                own, more = _touched(node.body)
                outer = {name for one in inside for name in one.names}
                own |= {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
                bound |= outer
                changed |= more - (own - outer)
    values, lost = [], []
    for name in sorted((bound | changed) & namespace.keys()):
        value = namespace[name]
        if isinstance(value, nn.Module | Optimizer | DataLoader | type) or callable(value):
            continue
        plain = isinstance(value, (*DATA, torch.Tensor)) or type(value).__module__ == "numpy"
        if isinstance(value, torch.Tensor) and (value.grad_fn is not None or name not in before):
            continue
        if not plain and (name not in changed or isinstance(value, type(ast)) or hasattr(value, "state_dict")):
            continue
        try:
            pickle.dumps(value)
        except Exception:  # whatever its class raises
            lost.append(name)
        else:
            values.append(name)
    return values, lost


def _touched(body: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """Names that statements bind, and those whose objects they may change."""
    bound, changed = set[str](), set[str]()
    for part in body:
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                root = node.func.value
                changed |= {root.id} if isinstance(root, ast.Name) else set()
            elif isinstance(node, ast.stmt):
                changed.update(_changes(node))
    return bound, changed


def _changes(node: ast.stmt) -> Iterator[str]:
    """Names whose objects a statement may change: by an attribute, an item, a method, or as an argument of a call whose
    result nobody takes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for one in ast.walk(node):
        targets: list[ast.expr] = []
        if isinstance(one, ast.Assign):
            targets = one.targets
        elif isinstance(one, ast.AugAssign | ast.AnnAssign | ast.For):
            targets = [one.target]
        for target in targets:
            if isinstance(target, ast.Attribute | ast.Subscript) and (name := root(target)):
                yield name
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            yield one.target.id
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
            yield from _changed_by(one.value)


def _changed_by(call: ast.Call) -> Iterator[str]:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    of = root(call.func)
    if last in SHOWS or of in SHOWS:
        return
    if isinstance(call.func, ast.Attribute) and of:
        yield of
    for given in (*call.args, *(word.value for word in call.keywords)):
        for one in ast.walk(given):
            if isinstance(one, ast.Name):
                yield one.id
