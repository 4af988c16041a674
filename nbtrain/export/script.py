"""Puts a script together: what the notebook defines, the strategy in plain torch, the cell."""

from __future__ import annotations

import ast
import builtins
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nbtrain.errors import NotSupported, UsageError
from nbtrain.export import accumulation, strategy_code
from nbtrain.export.needed_statements import Slice, Statement, needed, statements
from nbtrain.export.rewrite_loops import Loaders, dealt_loops, functions
from nbtrain.specs import RunSpec

HEAD = ("import os", "import sys", "import torch", "import torch.distributed as dist")
PRECISIONS = {"32": "", "bf16-mixed": "torch.bfloat16"}
REFUSED = {
    "scale_lr": ("", "--scale-lr {}: write the rate in the cell"),
    "checkpoint_activations": ((), "--checkpoint-activations: call torch.utils.checkpoint in the model"),
    "share_eval": (False, "--share-eval: leave it out, and every process evaluates all"),
}
"""options that a script has no line for → (value without it, what to write)"""


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


def export(source: Source) -> Exported:
    form = _form(source.run)
    history = [one for number, text in source.history.items() for one in statements(number, text)]
    given = frozenset(strategy_code.USES) | frozenset(dir(builtins))
    names = {name for name in source.reads if name not in given or name in source.namespace}
    found = needed(history, names, given)
    result = Exported("")
    saved = _by_value(source, found, result)
    if saved:  # what it was made of is not needed any more
        dropped = {name for name in saved if not any(name in one.changes for one in found.statements)}
        history = [one for one in history if not (one.binds and one.binds <= dropped)]
        found = needed(history, names - saved.keys(), given | frozenset(saved))
    result.saved = saved
    result.text = _text(source, form, found, saved, result.notes)
    result.cells = [source.history[number] for number in sorted({one.cell for one in found.statements})]
    _note_the_rest(source, found, form, result)
    return result


def _form(run: RunSpec) -> strategy_code.Form:
    if (why := strategy_code.NONE.get(run.strategy)) is not None:
        raise NotSupported(f"export: --strategy {run.strategy} has no plain form: {why}")
    if run.strategy not in strategy_code.FORMS:
        raise NotSupported(f"export: {run.strategy} is a strategy of your own: a script cannot have it without nbtrain")
    if run.precision not in PRECISIONS:
        raise NotSupported(f"export: --precision {run.precision}: a script may have 32 or bf16-mixed")
    for name, (without, instead) in REFUSED.items():
        value = getattr(run, name)
        if value != without and value:
            raise NotSupported("export has no line for " + instead.format(value, value))
    return strategy_code.FORMS[run.strategy](dict(run.options))


def _by_value(source: Source, found: Slice, result: Exported) -> dict[str, Any]:
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
    seeded = False
    for one in found.statements:
        seeded |= one.seeds
        if seeded or not one.draws or one.imports:
            continue
        for name in one.binds:
            value = source.namespace.get(name)
            if _is_data(value):
                _save(name, value, f"cell [{one.cell}] draws it without a seed", saved, result)
    return saved


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | dict | tuple) or type(value).__module__.startswith(
        ("numpy", "pandas")
    )


def _save(name: str, value: Any, why: str, saved: dict[str, Any], result: Exported) -> None:
    if isinstance(value, type(builtins)):
        result.notes.append(f"{name} is the module {value.__name__}, which no cell imports: the script does")
        return
    try:
        pickle.dumps(value)
    except Exception as error:  # whatever its class raises
        raise UsageError(f"export: {name} is needed, {why}, and it cannot be saved: {error}") from None
    saved[name] = value
    result.notes.append(f"{name} is saved beside the script: {why}")


def _text(
    source: Source, form: strategy_code.Form, found: Slice, saved: dict[str, Any], notes: list[str]
) -> str:  # fmt: skip
    namespace = source.namespace
    models = _models(namespace, found, source)
    every = dict.fromkeys(one.text for one in found.statements if one.imports and "nbtrain" not in one.text)
    imports = [one for one in every if one not in HEAD]
    modules = [
        f"import {namespace[name].__name__}" + (f" as {name}" if namespace[name].__name__ != name else "")
        for name in sorted(found.missing)
        if isinstance(namespace.get(name), type(builtins))
    ]
    rest = [one for one in found.statements if not one.imports]
    loaders = _loaders(namespace, [source.cell, *(one.text for one in rest)])
    cell, deals = _on_ranks(source.cell, loaders, source)
    used = source.reads | set().union(*(one.reads | one.late for one in rest), set())
    helpers = [text for name, text in strategy_code.USES.items() if name in used and name not in _bound(rest)]
    parts = [
        f'"""{source.title}\n\n    torchrun --nproc-per-node {source.run.pool.world_size} {{}}\n"""',
        "\n".join([*HEAD, *imports, *modules]),
        strategy_code.PROCESSES.strip(), _batches(source.run, form),
        *([strategy_code.PRECISION.strip()] if PRECISIONS[source.run.precision] else []),
        *(one.strip() for one in form.parts(source.run.accumulate)), *helpers,
        "# What the notebook defines",
    ]  # fmt: skip
    parts += _definitions(rest, models, form, source, saved, loaders)
    parts.append(f"MODELS = {models!r}\nsame_random_numbers()")
    parts.append("# The cell")
    parts.append(cell.strip("\n"))
    parts.append(
        "trained = {name: weights(globals()[name]) for name in MODELS}\nif RANK == 0:\n"
        '    torch.save(trained, "trained.pt")'
    )
    parts.append(strategy_code.LEAVE.strip())
    if not deals and any(loaders.names & (one.reads | one.late) for one in rest) and source.run.pool.world_size > 1:
        notes.append("no loop that trains iterates a loader of the notebook: every process sees the same samples")
    return _spaced("\n\n".join(parts)) + "\n"


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


def _on_ranks(text: str, loaders: Loaders, source: Source) -> tuple[str, bool]:
    """A cell or a function as the script has it, and whether a loop of it may see a share."""
    text, deals = dealt_loops(text, loaders)
    return (accumulation.accumulated(text, source.namespace) if source.run.accumulate > 1 else text), deals


def _spaced(text: str) -> str:
    """Statements stand together, functions and classes apart."""
    blocks = re.split(r"\n{2,}(?=\S)", text)
    found = blocks[0]
    for before, block in pairwise(blocks):
        apart = any(one.startswith(("def ", "class ", "@", "#", "import ", '"""')) for one in (before, block))
        found += ("\n\n" if apart else "\n") + block
    return found


def _bound(rest: list[Statement]) -> set[str]:
    return set().union(*(one.binds for one in rest), set())


def _models(namespace: Mapping[str, Any], found: Slice, source: Source) -> list[str]:
    """Names of the models that are prepared: not those that are a part of another one."""
    names = _bound(found.statements) & source.reads | (_bound(found.statements) & _late(found))
    models = {name: value for name, value in namespace.items() if name in names and isinstance(value, nn.Module)}
    inner = {id(part) for one in models.values() for part in one.modules() if part is not one}
    losses = {name for name, one in models.items() if next(one.parameters(), None) is None}
    return [name for name, one in models.items() if id(one) not in inner and name not in losses]


def _late(found: Slice) -> set[str]:
    return set().union(*(one.late for one in found.statements), set())


def _definitions(
    rest: list[Statement], models: list[str], form: strategy_code.Form, source: Source, saved: dict[str, Any],
    loaders: Loaders,
) -> list[str]:  # fmt: skip
    """The statements, with models prepared before optimizers are made of them."""
    lines: list[str] = []
    waiting, left = list(models), set(saved)
    optimizers = {name for name, value in source.namespace.items() if isinstance(value, Optimizer)}
    precision = PRECISIONS[source.run.precision]

    def prepare() -> None:
        for name in waiting:
            if precision:
                lines.append(f"compute_in({name}, {precision})")
            lines.append(f"{name} = prepared({name})")
        waiting.clear()

    def read(names: set[str]) -> None:
        for name in sorted(names & left):
            lines.append(
                f"{name} = torch.load(os.path.join(os.path.dirname(os.path.abspath(__file__)), {source.objects!r}), "
                f"weights_only=False)[{name!r}]"
            )
            left.discard(name)

    for one in rest:
        read(set(one.reads))
        if one.binds & optimizers:
            prepare()
        defines = isinstance(one.node, ast.FunctionDef | ast.ClassDef)
        lines.append(_on_ranks(one.text, loaders, source)[0] if defines else one.text)
        if form.optimizer:
            lines += [f"{name} = {form.optimizer}({name})" for name in sorted(one.binds & optimizers)]
    prepare()
    read(set(left))
    return lines


def _note_the_rest(source: Source, found: Slice, form: strategy_code.Form, result: Exported) -> None:
    models = {name for name in source.reads if isinstance(source.namespace.get(name), nn.Module | Optimizer)}
    made = max((one.cell for one in found.statements if one.binds & models), default=0)
    earlier = [
        number
        for number, text in source.others.items()
        if made < number < source.number and models & _words(number, text)
    ]
    if earlier:
        cells = ", ".join(f"[{number}]" for number in earlier)
        result.notes.append(f"cell {cells} has trained, too, and is not in the script: %distributed export --cell N")
    if any(isinstance(source.namespace.get(name), nn.Module) for name in source.reads) and not any(
        one.seeds for one in found.statements
    ):
        result.notes.append("no seed is set: weights begin otherwise than in the notebook")
    if form.note:
        result.notes.append(form.note)


def _words(number: int, text: str) -> set[str]:
    try:
        return set().union(*(one.reads | one.binds for one in statements(number, text)), set())
    except SyntaxError:
        return set()


def write(path: Path, text: str, saved: dict[str, Any], objects: Path, force: bool) -> None:
    for one in (path, *((objects,) if saved else ())):
        if one.exists() and not force:
            raise UsageError(f"{one} is there already: another name, or --force")
    path.write_text(text)
    if saved:
        torch.save(saved, objects)
