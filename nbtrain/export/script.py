"""Puts a script together: what the notebook defines, the strategy in plain torch, the cell."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbtrain.errors import NotSupported, UsageError
from nbtrain.export import accumulation, deepspeed_code, resume_code, strategy_code
from nbtrain.export.definitions import Made, bound, definitions
from nbtrain.export.effects import SEEDS
from nbtrain.export.fingerprint import fingerprint
from nbtrain.export.needed_statements import Slice, Statement, needed, read_first, statements
from nbtrain.export.rewrite_loops import TRAINS, Loaders, dealt_loops, functions
from nbtrain.export.text_edits import Edits
from nbtrain.specs import RunSpec

HEAD = ("import os", "import sys", "import torch", "import torch.distributed as dist")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
PRECISIONS = {"32": "", "bf16-mixed": "torch.bfloat16"}
REFUSED = {
    "scale_lr": ("", "--scale-lr {}: write the rate in the cell"),
    "checkpoint_activations": ((), "--checkpoint-activations: call torch.utils.checkpoint in the model"),
    "share_eval": (False, "--share-eval: leave it out, and every process evaluates all"),
}
"""options that a script has no line for → (value without it, what to write)"""
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
COMPARES = """
    if WORLD_SIZE == {}:
        for name in NOTEBOOK:
            compare(name, trained[name])"""
INSERTED = frozenset(
    {"dealt", "whole", "dealt_if_training", "accumulation", "prepared", "shared_out", "with_engine", "compute_in"}
)
"""functions of the script that are called within the notebook's statements"""
UNCHANGING = (int, float, complex, str, bytes, type(None), type, type(builtins), torch.device, torch.dtype)
OF_A_RANK = frozenset({"load", "setup", "on_each_rank"})
"""what a cell may call on a rank, and has no plain form"""


@dataclass(slots=True)
class Exported:
    text: str
    saved: dict[str, Any] = field(default_factory=dict)
    """objects that no cell makes, to be saved beside the script"""
    notes: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    """the texts of the needed cells, for a notebook"""


@dataclass(frozen=True)
class Source:
    """What is exported."""

    title: str
    cell: str
    """its text, without the magic"""
    number: int
    history: Mapping[int, str]
    """number → text of the cells before it that were run and did not fail"""
    others: Mapping[int, str]
    """number → text of other distributed cells"""
    namespace: Mapping[str, Any]
    run: RunSpec
    reads: frozenset[str]
    writes: frozenset[str]
    objects: str
    """the file that what is saved goes to"""
    checkpoint: str
    """that of --resume"""
    latest: bool
    """no other distributed cell was run after it: the notebook has what it has trained"""


def export(source: Source) -> Exported:
    form = _form(source.run)
    history = [one for number, text in source.history.items() for one in statements(number, text)]
    given = frozenset(strategy_code.USES) | frozenset(dir(builtins))
    reads = source.reads & read_first(source.cell)
    names = {name for name in reads if name not in given or name in source.namespace}
    still = _still(source.namespace, history)
    found = needed(history, names, given, still=still)
    result = Exported("")
    saved = _by_value(source, names, found, result)
    if saved:  # what it was made of is not needed any more
        found = needed(history, names, given, frozenset(saved), still)
        classes = needed(history, set().union(*map(_own_types, saved.values())), given, frozenset(saved), still)
        first = [one for one in classes.statements if not one.effect.seeds]  # torch.load needs them, of every object
        found.statements = [*first, *(one for one in found.statements if all(one is not each for each in first))]
        found.missing |= classes.missing
    cells = [one.cell for one in found.statements if one.effect.writes_inside]
    result.notes += [f"cell [{cell}] calls a function that writes files, and so does the script" for cell in cells]
    _refuse_what_is_of_nbtrain(source, found)
    _refuse_what_is_not_prepared(source, found)
    if source.run.strategy in ("ddp", "zero1"):
        _refuse_calls_of_parts(source, found)
    result.saved = saved
    result.text = _text(source, form, found, saved, result.notes)
    result.cells = [source.history[number] for number in sorted({one.cell for one in found.statements})]
    _note_the_rest(source, found, form, result)
    _note_draws(source, found, result)
    return result


def _form(run: RunSpec) -> strategy_code.Form:
    if (why := strategy_code.NONE.get(run.strategy)) is not None:
        raise NotSupported(f"export: --strategy {run.strategy} has no plain form: {why}")
    if run.strategy not in (*strategy_code.FORMS, "deepspeed"):
        raise NotSupported(f"export: {run.strategy} is a strategy of your own: a script cannot have it without nbtrain")
    if run.precision not in PRECISIONS:
        raise NotSupported(f"export: --precision {run.precision}: a script may have 32 or bf16-mixed")
    for name, (without, instead) in REFUSED.items():
        value = getattr(run, name)
        if value != without and value:
            raise NotSupported("export has no line for " + instead.format(value, value))
    if run.strategy != "deepspeed":
        return strategy_code.FORMS[run.strategy](dict(run.options))
    if run.accumulate > 1:
        raise NotSupported("export: --accumulate under deepspeed: step every few batches in the loop itself")
    code = deepspeed_code.code(dict(run.options), run.precision)
    return strategy_code.Form(code, "with_engine", engine=True)


def _refuse_what_is_of_nbtrain(source: Source, found: Slice) -> None:
    """Functions and modules that a script without it does not have."""
    cell = statements(source.number, source.cell)
    for one in (*cell, *found.statements):
        for name in sorted(one.reads | one.late):
            value = source.namespace.get(name)
            module = getattr(value, "__name__" if isinstance(value, type(builtins)) else "__module__", None) or ""
            own = name in OF_A_RANK and name not in source.namespace
            if own or str(module).split(".")[0] == "nbtrain":
                line = next((line for line in one.text.splitlines() if name in line), one.text)
                raise NotSupported(f"export: `{line.strip()}` needs nbtrain, which a script does without")


def _refuse_what_is_not_prepared(source: Source, found: Slice) -> None:
    """Models are prepared where a statement makes them: what trains out of its sight would train on each process."""
    texts = [source.cell, *(one.text for one in found.statements)]
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr == "state_dict" and source.run.strategy == "fsdp":
                raise NotSupported(
                    "export: under fsdp state_dict() has the pieces of one process: call save(path), which writes "
                    "whole weights"
                )
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("autograd.grad"):
                raise NotSupported(
                    "export: what torch.autograd.grad gives is one process's own: add it up with dist.all_reduce in a "
                    "script of your own"
                )
    for node in ast.walk(ast.parse(source.cell)):
        if not isinstance(node, ast.For | ast.While | ast.If | ast.Try | ast.With):
            continue
        for one in ast.walk(node):
            name = one.id if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) else ""
            if isinstance(source.namespace.get(name), nn.Module | Optimizer):
                raise NotSupported(
                    f"export: the cell makes {name} in a `{type(node).__name__.lower()}`: a script prepares models "
                    "where a statement of its own makes them; make it before"
                )
    for name in sorted(source.reads):
        value = source.namespace.get(name)
        if name not in source.namespace and any(name in one.binds for one in found.statements):
            raise NotSupported(f"export: the notebook has no {name} any more: export a cell while its names are there")
        if isinstance(value, DataLoader) and isinstance(value.dataset, IterableDataset):
            raise NotSupported(
                f"export: {name} is a stream, which a script cannot deal out without nbtrain: let the data set take "
                "its own part, itertools.islice(…, rank, None, world_size), or have a data set with indices"
            )


def _refuse_unprepared(source: Source, made: Made, deals: bool) -> None:
    if deals and not made.models:
        raise NotSupported(
            "export: a script prepares the models that are names of the notebook, and this cell trains none of those: "
            "bind the model to a name in a cell, and use that name"
        )
    if source.run.pool.world_size > 1 and (names := made.without_model()):
        raise NotSupported(
            f"export: {names[0]} trains parameters that are in no model which is a name of the notebook, so nobody "
            "would average their gradients: put them into the model"
        )


def _refuse_calls_of_parts(source: Source, found: Slice) -> None:
    """DistributedDataParallel averages the gradients of a model that is called, not of a part of it."""
    for text in (source.cell, *(one.text for one in found.statements)):
        for call in ast.walk(ast.parse(text)):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute | ast.Subscript)):
                continue
            holder = call.func.value
            model = source.namespace.get(holder.id) if isinstance(holder, ast.Name) else None
            if not isinstance(model, nn.Module):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else None
            if name is None or isinstance(getattr(model, name, None), nn.Module):
                said = ast.unparse(call.func)
                raise NotSupported(
                    f"export: `{said}(…)` calls a part of a model, and DistributedDataParallel averages the gradients "
                    f"of one that is called whole: give {type(model).__name__} a method that does it, or take -s fsdp "
                    "--wrap"
                )


def _still(namespace: Mapping[str, Any], history: list[Statement]) -> frozenset[str]:
    """Names that have only been numbers, functions, or losses: what nothing changes."""
    texts: dict[str, set[str]] = {}
    for one in history:
        for name in one.binds:
            texts.setdefault(name, set()).add(one.text)
    return frozenset(
        name for name, bound in texts.items() if len(bound) == 1 and name in namespace and _is_still(namespace[name])
    )


def _is_still(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return not value.state_dict()
    return isinstance(value, UNCHANGING) or (callable(value) and hasattr(value, "__qualname__"))


def _by_value(source: Source, names: set[str], found: Slice, result: Exported) -> dict[str, Any]:
    """Objects that only exist by history: nothing in it makes them, or it made them with numbers that it would draw
    otherwise."""
    saved: dict[str, Any] = {}
    for name in sorted(found.missing - source.writes):  # what the cell binds itself it will not read before
        if name in source.namespace:
            _save(name, source.namespace[name], "no cell that was run makes it", saved, result)
        elif not hasattr(builtins, name):
            result.notes.append(
                f"{name}: no cell makes it, and the notebook has none; the script has to say what it is"
            )
    used = names.union(*(one.reads | one.late for one in found.statements))
    seeded: frozenset[str] = frozenset()
    drawn: dict[str, str] = {}
    for at, one in enumerate(found.statements):
        unseeded = one.effect.draws - seeded
        seeded |= one.effect.seeds
        later = set().union(*(each.binds | each.changes for each in found.statements[at:]))
        # what is saved is as it is at the end: what was made of it before has to be saved, too
        of = sorted(one.reads & drawn.keys() & later)
        if not (unseeded or of):
            continue
        why = f"cell [{one.cell}] draws it without a seed" if unseeded else drawn[of[0]]
        drawn.update(dict.fromkeys((one.binds | one.changes) & used, why))
    for name, why in sorted(drawn.items()):
        value = source.namespace.get(name)
        if _is_data(value):
            _save(name, value, why, saved, result)
        elif value is not None and not isinstance(value, nn.Module | Optimizer) and not _is_still(value):
            result.notes.append(f"{name}: {why}, and it is not saved: it begins otherwise than in the notebook")
    return saved


def _is_data(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad  # it would be saved trained
    own = type(value).__module__.startswith(("numpy", "pandas"))
    return own or isinstance(value, list | dict | tuple | int | float | str | Dataset)


class _Parts(pickle.Pickler):
    """The models and optimizers in a value, and the notebook's own types."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.trained: list[Any] = []
        self.types: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        weights = isinstance(value, nn.Module) and bool(value.state_dict())
        if weights or isinstance(value, Optimizer) or (isinstance(value, torch.Tensor) and value.requires_grad):
            self.trained.append(value)
        named = value if hasattr(value, "__qualname__") else type(value)
        if getattr(named, "__module__", None) == "__main__":
            self.types.add(named.__qualname__.split(".")[0])


def _parts(value: Any) -> _Parts:
    found = _Parts()
    found.dump(value)
    return found


def _own_types(value: Any) -> set[str]:
    return _parts(value).types


def _save(name: str, value: Any, why: str, saved: dict[str, Any], result: Exported) -> None:
    if isinstance(value, type(builtins)):
        result.notes.append(f"{name} is the module {value.__name__}, which no cell imports: the script does")
        return
    try:
        parts = _parts(value)
    except Exception as error:  # whatever its class raises
        raise UsageError(f"export: {name} is needed, {why}, and it cannot be saved: {error}") from None
    if parts.trained:
        held = type(parts.trained[0]).__name__
        raise UsageError(
            f"export: {name} is needed, {why}, and its {held} is not saved, as it would be with the weights of today: "
            f"run a cell of the notebook that makes {name}, then the %%distributed cell, and export that"
        )
    saved[name] = value
    result.notes.append(f"{name} is saved beside the script: {why}")


def _text(
    source: Source, form: strategy_code.Form, found: Slice, saved: dict[str, Any], notes: list[str]
) -> str:  # fmt: skip
    namespace = source.namespace
    head, cell = _divided(source)
    making = [*found.statements, *head]
    made = Made(namespace, making, source.reads | source.writes)
    every = dict.fromkeys(one.text for one in making if one.imports and "nbtrain" not in one.text)
    imports = [one for one in every if one not in HEAD]
    modules = [
        f"import {namespace[name].__name__}" + (f" as {name}" if namespace[name].__name__ != name else "")
        for name in sorted(found.missing)
        if isinstance(namespace.get(name), type(builtins))
    ]
    rest = [one for one in found.statements if not one.imports]
    on_ranks = OnRanks(source, _loaders(namespace, [source.cell, *(one.text for one in rest)]))
    again = resume_code.resumable(
        cell, made, on_ranks.loaders, [one.text for one in rest], namespace, bound(making), source.run.strategy,
        source.run.accumulate > 1, source.checkpoint,
    )  # fmt: skip
    notes += again.notes
    cell = on_ranks.text(again.cell)
    trains, _ = functions([source.cell, *(one.text for one in rest)])
    _refuse_unprepared(source, made, bool((trains | TRAINS) & set().union(*map(_called, [source.cell]))))
    used = source.reads | set().union(*(one.reads | one.late for one in rest), set())
    helpers = [text for name, text in strategy_code.USES.items() if name in used and name not in bound(rest)]
    if again.code:
        helpers = [one for one in helpers if one != strategy_code.USES["resumable"]] + [again.code]
    parts = [
        f'"""{source.title}\n\n    torchrun --nproc-per-node {source.run.pool.world_size} {{}}\n"""',
        "\n".join(dict.fromkeys([*HEAD, *imports, *modules, *filter(None, [again.imports])])),
        strategy_code.PROCESSES.strip(), strategy_code.SAME_DRAWS.strip(), _batches(source.run, form),
        *([strategy_code.PRECISION.strip()] if PRECISIONS[source.run.precision] else []),
        *(one.strip() for one in form.parts(source.run.accumulate)), *helpers,
    ]  # fmt: skip
    at = len(parts)
    parts.append("# What the notebook defines")
    dtype, left = PRECISIONS[source.run.precision], set(saved)

    def read(names: set[str]) -> list[str]:
        found = sorted(names & left)
        left.difference_update(found)
        where = f"os.path.join(os.path.dirname(os.path.abspath(__file__)), {source.objects!r})"
        return [f"{name} = torch.load({where}, weights_only=False)[{name!r}]" for name in found]

    parts += definitions(list(map(on_ranks.statement, rest)), made, form, dtype, read)
    parts += read(set(left))
    begin = f"MODELS = {made.models!r}\nsame_random_numbers()"
    if head:
        own = [on_ranks.statement(one) for one in head if not one.imports]
        parts += ["# The cell", *definitions(own, made, form, dtype, read), begin]
    else:
        parts += [begin, "# The cell"]
    parts.append(cell.strip("\n"))
    told = _compared(source, made)
    parts.append(
        "trained = {name: weights(globals()[name]) for name in MODELS}\nif RANK == 0:\n"
        '    torch.save(trained, "trained.pt")' + (COMPARES.format(source.run.pool.world_size) if told else "")
    )
    parts[at:at] = told
    parts.append(strategy_code.LEAVE.strip())
    mine = {*range(2, at + len(told)), parts.index(begin), len(parts) - 2, len(parts) - 1}
    parts = _without_collisions(parts, mine, bound(making) | source.writes)
    if on_ranks.norms:
        if len(on_ranks.norms) > 1:
            raise NotSupported("export: DeepSpeed's engine clips at one norm, and the cell at several: take -s fsdp")
        clipping = f"'gradient_clipping': {on_ranks.norms.pop()}"
        parts = [one.replace("'gradient_clipping': 0.0", clipping) for one in parts]
    read_here = any(on_ranks.loaders.names & (one.reads | one.late) for one in rest)
    if not on_ranks.deals and read_here and source.run.pool.world_size > 1:
        notes.append("no loop that trains iterates a loader of the notebook: every process sees the same samples")
    return _spaced("\n\n".join(parts)) + "\n"


def _without_collisions(parts: list[str], mine: set[int], taken: set[str]) -> list[str]:
    """With other names for the script's own functions and values where the notebook has these. `mine`: the places of
    the script's own parts."""
    own = set().union(*(one.binds for at in mine for one in statements(0, parts[at])), set()) - {"print"}
    given = [text for text in strategy_code.USES.values() if text in parts]  # what a cell calls on a rank
    own -= set().union(*(one.binds for text in given for one in statements(0, text)), set())
    for name in sorted(own & taken):
        if name in INSERTED:
            raise NotSupported(f"export: {name} is a function of the script's own: give yours another name")
        word = re.compile(rf"(?<![\w.\"']){name}\b(?!=)")
        for at in mine:
            parts[at] = word.sub(f"{name}_", parts[at])
    return parts


def _called(text: str) -> set[str]:
    """The last words of what it calls."""
    calls = [one.func for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call)]
    return {getattr(one, "attr", getattr(one, "id", "")) for one in calls}


def _compared(source: Source, made: Made) -> list[str]:
    """What tells at the end whether the weights are the notebook's: numbers of these, and functions."""
    models = {name: source.namespace[name] for name in made.models}
    tensors = [one for model in models.values() for one in (*model.parameters(), *model.buffers())]
    drops = source.run.pool.world_size > 1 and any(
        isinstance(part, DROPOUT) and part.p for model in models.values() for part in model.modules()
    )
    if not (source.latest and models) or drops or any(type(one) not in PLAIN_TENSORS or one.is_meta for one in tensors):
        return []
    numbers = {name: fingerprint(model.state_dict()) for name, model in models.items()}
    tolerance = "1e-4" if source.run.precision == "32" else "1e-2"
    return [
        f"NOTEBOOK = {numbers!r}",
        inspect.getsource(fingerprint).strip(),
        strategy_code.COMPARED.strip().replace("{tolerance}", tolerance),
    ]


def _batches(run: RunSpec, form: strategy_code.Form) -> str:
    """What deals them out."""
    counted = run.accumulate > 1
    text = f"SPLIT = {run.split_batches}\n" + strategy_code.LOADERS.strip().replace(
        "{counted}", "Counted" if counted else "OnDevice"
    )
    if counted:
        code = accumulation.CODE.replace("{synchronize}", form.synchronize)
        text = f"ACCUMULATE = {run.accumulate}\n{text}\n\n{code.strip()}"
    return text


def _loaders(namespace: Mapping[str, Any], texts: list[str]) -> Loaders:
    train, evaluate = functions(texts)
    held: dict[str, list[str]] = {}
    for name, value in namespace.items():
        if isinstance(value, type | type(builtins) | nn.Module):
            continue
        kept = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        kept = dict(enumerate(value)) if isinstance(value, list | tuple) else kept
        if found := [str(key) for key, one in kept.items() if isinstance(one, DataLoader)]:
            held[name] = found if not isinstance(value, dict | list | tuple) else []
    return Loaders(
        frozenset(name for name, value in namespace.items() if isinstance(value, DataLoader)),
        frozenset(name for name, found in held.items() if not found),
        frozenset().union(*held.values()),
        train,
        evaluate,
    )


class OnRanks:
    """A cell and functions as the script has them."""

    def __init__(self, source: Source, loaders: Loaders) -> None:
        self.source, self.loaders = source, loaders
        self.deals = False
        """a loop of them may see a share"""
        self.norms: set[float] = set()
        """that an engine clips at"""

    def text(self, text: str) -> str:
        text, deals = dealt_loops(text, self.loaders)
        self.deals |= deals
        if self.source.run.accumulate > 1:
            text = accumulation.accumulated(text, self.source.namespace)
        if self.source.run.strategy == "deepspeed":
            text, norms = deepspeed_code.clipped(text, self.source.namespace)
            self.norms |= norms
        return text

    def statement(self, one: Statement) -> Statement:
        defines = isinstance(one.node, ast.FunctionDef | ast.ClassDef)
        return replace(one, text=self.text(one.text)) if defines else one


def _divided(source: Source) -> tuple[list[Statement], str]:
    """The cell's statements up to the last one that makes a model or an optimizer before any loop, and the rest."""
    head = []
    for one in statements(source.number, source.cell):
        if isinstance(one.node, ast.For | ast.While | ast.With | ast.If | ast.Try):
            break
        head.append(one)
    while head and not any(isinstance(source.namespace.get(name), nn.Module | Optimizer) for name in head[-1].binds):
        head.pop()
    if not head:
        return [], source.cell
    rest, last = Edits(source.cell), head[-1].node
    rest.replace((1, 0), (last.end_lineno or 0, last.end_col_offset or 0), "")
    return head, rest.text().lstrip(" ;")


def _spaced(text: str) -> str:
    """Statements stand together, functions and classes apart."""
    blocks = re.split(r"\n{2,}(?=\S)", text)
    found = blocks[0]
    for before, block in pairwise(blocks):
        apart = any(one.startswith(("def ", "class ", "@", "#", "import ", '"""')) for one in (before, block))
        found += ("\n\n" if apart else "\n") + block
    return found


def _note_the_rest(source: Source, found: Slice, form: strategy_code.Form, result: Exported) -> None:
    models = {name for name in source.reads if isinstance(source.namespace.get(name), nn.Module | Optimizer)}
    made = max(
        (one.cell for one in found.statements if one.binds & models), default=len(source.history) + source.number
    )
    earlier = [
        number
        for number, text in source.others.items()
        if made < number < source.number and models & _words(number, text)
    ]
    history = [one for number, text in source.history.items() for one in statements(number, text)]
    train, _ = functions(one.text for one in history)
    kept = {one.text for one in found.statements}
    earlier += [
        one.cell
        for one in history
        if made < one.cell and one.text not in kept and one.words & (train | TRAINS)
        and not isinstance(one.node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    ]  # fmt: skip
    if earlier:
        earlier = sorted(set(earlier))
        cells = ", ".join(f"[{number}]" for number in earlier)
        result.notes.append(f"cell {cells} has trained, too, and is not in the script: %distributed export --cell N")
    if any(isinstance(source.namespace.get(name), nn.Module) for name in source.reads) and not any(
        SEEDS & one.words for one in found.statements
    ):
        result.notes.append("no seed is set: weights begin otherwise than in the notebook")
    read = [one for name in source.reads if isinstance(one := source.namespace.get(name), nn.Module)]
    modules = [part for one in read for part in one.modules()]
    if form.statistics and any(getattr(one, "running_mean", None) is not None for one in modules):
        result.notes.append("running statistics (batch norm) are those of rank 0, where nbtrain averages them")
    if source.run.pool.world_size > 1 and any(isinstance(one, DROPOUT) and one.p for one in modules):
        result.notes.append("dropout: each process draws for itself, others than in the notebook")


def _note_draws(source: Source, found: Slice, result: Exported) -> None:
    """What is left out, and has drawn between a seed and what the script draws."""

    def draws(one: Statement) -> bool:
        return one.draws or any(isinstance(source.namespace.get(name), nn.Module) for name in one.binds)

    kept = {(one.cell, one.text) for one in found.statements}
    left_out: list[int] = []
    after: dict[int, str] = {}
    history = [one for number, text in source.history.items() for one in statements(number, text)]
    seeding = SEEDS | {
        name for one in history if isinstance(one.node, ast.FunctionDef | ast.ClassDef) and SEEDS & one.words
        for name in one.binds
    }  # fmt: skip
    ran = [Statement(number, text, ast.Pass()) for number, text in source.others.items() if number < source.number]
    for one in sorted([*history, *ran], key=lambda one: one.cell):
        is_kept = (one.cell, one.text) in kept
        if is_kept and seeding & one.words and not isinstance(one.node, ast.FunctionDef | ast.ClassDef):
            left_out = []
        elif is_kept and draws(one) and left_out:
            name = next(iter(sorted(one.binds)), one.text.splitlines()[0])
            after.update(dict.fromkeys(left_out, name))
        elif not is_kept and (isinstance(one.node, ast.Pass) or draws(one)):
            left_out.append(one.cell)
    for cell, name in after.items():
        if name not in result.saved:
            result.notes.append(f"cell [{cell}] has drawn random numbers before {name}, and is not in the script: "
                                f"{name} begins otherwise than in the notebook")  # fmt: skip


def _words(number: int, text: str) -> set[str]:
    try:
        return set().union(*(one.reads | one.binds for one in statements(number, text)), set())
    except SyntaxError:
        return set()


def refuse_existing(files: list[Path], force: bool) -> None:
    for one in files:
        if one.exists() and not force:
            raise UsageError(f"{one} is there already: another name, or --force")


def write(path: Path, text: str, saved: dict[str, Any], objects: Path) -> None:
    path.write_text(text)
    if saved:
        torch.save(saved, objects)
