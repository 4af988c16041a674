"""Puts a script together: what the notebook defines, the strategy in plain torch, the cell."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbtrain.errors import NotSupported, UsageError
from nbtrain.export import (
    accumulation,
    deepspeed_code,
    line_options,
    loaders_code,
    refusals,
    resume_code,
    strategy_code,
)
from nbtrain.export.definitions import Made, bound, definitions
from nbtrain.export.fingerprint import fingerprint
from nbtrain.export.needed_statements import Slice, Statement, needed, read_first, statements
from nbtrain.export.notes import draws_apart, note
from nbtrain.export.possible_loaders import Loaders
from nbtrain.export.rewrite_loops import TRAINS, dealt_loops, functions
from nbtrain.export.saved_objects import own_types, saved_objects, unchanging
from nbtrain.export.source import Exported, Source
from nbtrain.export.text_edits import Edits
from nbtrain.specs import RunSpec
from nbtrain.training.checkpoints.folder import telling_of_a_full_disk
from nbtrain.whole_file import replacing

HEAD = ("import os", "import sys", "import weakref", "import torch", "import torch.distributed as dist")
PRECISIONS = {"32": "", "bf16-mixed": "torch.bfloat16"}
ANOMALY = "torch.autograd.set_detect_anomaly(True)"
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
COMPARES = """
    if WORLD_SIZE == {}:
        for name in NOTEBOOK:
            compare(name, trained[name])"""
INSERTED = frozenset(
    {"dealt", "whole", "dealt_if_training", "accumulation", "prepared", "shared_out", "with_engine", "compute_in"}
)
"""functions of the script that are called within the notebook's statements"""


def export(source: Source) -> Exported:
    form = _form(source.run)
    history = [one for number, text in source.history.items() for one in statements(number, text)]
    given = frozenset(strategy_code.USES) | frozenset(dir(builtins))
    reads = source.reads & read_first(source.cell)
    names = {name for name in reads if name not in given or name in source.namespace}
    still = unchanging(source.namespace, history)
    found = needed(history, names, given, still=still)
    result = Exported("")
    saved = saved_objects(source, names, found, result)
    if saved:  # what it was made of is not needed any more
        found = needed(history, names, given, frozenset(saved), still)
        classes = needed(history, set().union(*map(own_types, saved.values())), given, frozenset(saved), still)
        first = [one for one in classes.statements if not one.effect.seeds]  # torch.load needs them, of every object
        found.statements = [*first, *(one for one in found.statements if all(one is not each for each in first))]
        found.missing |= classes.missing
    cells = [one.cell for one in found.statements if one.effect.writes_inside]
    result.notes += [f"cell [{cell}] calls a function that writes files, and so does the script" for cell in cells]
    refusals.refuse_what_is_of_nbtrain(source, found)
    refusals.refuse_what_is_not_prepared(source, found)
    if source.run.strategy in ("ddp", "zero1"):
        refusals.refuse_calls_of_parts(source, found)
    result.saved = saved
    result.text = _text(source, form, found, saved, result.notes)
    result.notes += line_options.notes(source.run)
    result.cells = [source.history[number] for number in sorted({one.cell for one in found.statements})]
    note(source, history, found, form, result)
    return result


def _form(run: RunSpec) -> strategy_code.Form:
    if (why := strategy_code.NONE.get(run.strategy)) is not None:
        raise NotSupported(f"export: --strategy {run.strategy} has no plain form: {why}")
    if run.strategy not in (*strategy_code.FORMS, "deepspeed"):
        raise NotSupported(f"export: {run.strategy} is a strategy of your own: a script cannot have it without nbtrain")
    if run.precision not in PRECISIONS:
        raise NotSupported(f"export: --precision {run.precision}: a script may have 32 or bf16-mixed")
    line_options.refuse(run)
    if run.strategy != "deepspeed":
        return strategy_code.FORMS[run.strategy](dict(run.options))
    if run.accumulate > 1:
        raise NotSupported("export: --accumulate under deepspeed: step every few batches in the loop itself")
    code = deepspeed_code.code(dict(run.options), run.precision)
    return strategy_code.Form(code, "with_engine", engine=True)


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
    refusals.refuse_unprepared(source, made, bool((trains | TRAINS) & set().union(*map(_called, [source.cell]))))
    used = source.reads | set().union(*(one.reads | one.late for one in rest), set())
    helpers = [text for name, text in strategy_code.USES.items() if name in used and name not in bound(rest)]
    if again.code:
        helpers = [one for one in helpers if one != strategy_code.USES["resumable"]] + [again.code]
    parts = [
        f'"""{source.title}\n\n    torchrun --nproc-per-node {source.run.pool.world_size} {{}}\n"""',
        "\n".join(dict.fromkeys([*HEAD, *imports, *modules, *filter(None, [again.imports])])),
        strategy_code.PROCESSES.strip(), *([ANOMALY] if source.run.detect_anomaly else []),
        loaders_code.SAME_DRAWS.strip(), _batches(source.run, form),
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
    told = _compared(source, made, found.statements)
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


def _compared(source: Source, made: Made, found: list[Statement]) -> list[str]:
    """What tells at the end whether the weights are the notebook's: numbers of these, and functions."""
    models = {name: source.namespace[name] for name in made.models}
    tensors = [one for model in models.values() for one in (*model.parameters(), *model.buffers())]
    draws = draws_apart(source, [part for model in models.values() for part in model.modules()], found)
    away = source.run.background or not models.keys().isdisjoint(source.run.keep)
    if (
        not (source.latest and models)
        or draws
        or away
        or any(type(one) not in PLAIN_TENSORS or one.is_meta for one in tensors)
    ):
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
    shares = loaders_code.DEALS if run.sampler else loaders_code.ALL_SEE_ALL
    text = f"SPLIT = {run.split_batches}\n{shares}\n" + loaders_code.LOADERS.strip().replace(
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
        namespace,
        tuple(texts),
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


def refuse_existing(files: list[Path], force: bool) -> None:
    for one in files:
        if one.exists() and not force:
            raise UsageError(f"{one} is there already: another name, or --force")


def write(path: Path, text: str, saved: dict[str, Any], objects: Path) -> None:
    try:  # with --force there is another script, which stays where there is no room for this one
        with replacing(path) as script:
            Path(script).write_text(text)
            if saved:
                with replacing(objects) as beside, telling_of_a_full_disk(str(objects)):
                    torch.save(saved, beside)
    except OSError as error:
        raise UsageError(f"export: {path} is not written: {error.strerror or error}") from error
