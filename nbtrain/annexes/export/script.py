"""Puts a script together: what the notebook defines, the strategy in plain torch, the cell."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.annexes.export import line_options, strategy_code
from nbtrain.annexes.export.loop_marks import calls, marked, that_train
from nbtrain.annexes.export.notes import notes
from nbtrain.annexes.export.refusals import Made, refuse
from nbtrain.annexes.export.resume_code import Resumable, resumable
from nbtrain.annexes.export.saved_objects import Missing
from nbtrain.annexes.export.source import Exported, Source
from nbtrain.annexes.export.statements import COMPOUND, Statement, kept, statements
from nbtrain.annexes.export.strategy_code import LEAVE
from nbtrain.annexes.export.text_edits import Edits
from nbtrain.base.atomic_write import replacing
from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.exchange.names.cell_names import analyse, reach
from nbtrain.worker.checkpoints.folder import telling_of_a_full_disk
from nbtrain.worker.data.loop_code import TRAINS

TITLE = '''"""{title}: torchrun --nproc-per-node {ranks} {{}}
All cells before it, without what only shows, saves or is read nowhere. Names with an underscore are its own."""
'''


def export(source: Source) -> Exported:
    line_options.refuse(source.run)
    strategy_code.refuse(source.run)
    namespace, result = source.namespace, Exported("")
    names = analyse(source.cell)
    reached = reach(names, namespace)
    used = [*reached.hard, *reached.soft, *sorted(names.writes & namespace.keys())]
    history = [statement for number, text in source.history.items() for statement in statements(number, text)]
    chosen = kept(history, {*used, *names.reads}, namespace)
    head, rest = _divided(source)
    bound = frozenset().union(*(statement.binds for statement in (*chosen.statements, *head)))
    made = Made(namespace, [name for name in used if name in bound or name not in names.writes])
    texts = [statement.text for statement in chosen.statements if statement.defines]
    train = that_train([source.cell, *texts])
    refuse(source, chosen, made, frozenset(reached.hard), train)

    given = strategy_code.USES.keys() - namespace.keys()
    missing = Missing(source, chosen.statements, frozenset(given), result)
    cells = []
    for number, of in groupby(chosen.statements, key=lambda statement: statement.cell):
        lines = [
            line for statement in of for line in missing.before(statement, _in_script(statement, namespace, train))
        ]
        cells.append("\n".join([f"# Cell [{number}]", *lines]))
    again = Resumable(rest)
    if source.checkpoint:
        again = resumable(rest, texts, made, train, namespace, source.run.strategy, source.checkpoint)
    cell_statement = Statement(source.number, "", ast.Pass(), names.reads, names.writes - names.certain.keys())
    cell = [
        "# The cell",
        *missing.before(cell_statement),
        *(_in_script(statement, namespace, train) for statement in head),
    ]
    begun = [*cell, *_prepared(source, made, [source.cell, *texts]), marked(again.cell, namespace, train).strip("\n")]
    reads = names.reads.union(*(statement.reads for statement in chosen.statements)) & given
    helpers = [text for name, text in strategy_code.USES.items() if name in reads]
    if source.run.strategy not in ("fsdp", "deepspeed"):
        helpers = [helper.replace("_weights(globals()[name])", "globals()[name].state_dict()") for helper in helpers]
    stepped = any(calls(statement.node) & train for statement in chosen.statements if not statement.defines)
    text = "\n".join([source.cell, *(statement.text for statement in chosen.statements)])
    own = [
        strategy_code.PROCESSES, *(["torch.autograd.set_detect_anomaly(True)"] if source.run.detect_anomaly else []),
        strategy_code.loaders(source.run, text), *strategy_code.code(source.run, stepped),
    ]  # fmt: skip
    _refuse_names_of_the_script(own, bound | names.writes, namespace)
    title = TITLE.format(title=source.title, ranks=source.run.pool.world_size)
    parts = [title, *own, *cells, *helpers, again.code, "\n".join(begun), _end(source, made)]
    result.text = "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"
    result.notes += [*again.notes, *line_options.notes(source.run), *notes(source, chosen, made, reached.hard, train)]
    result.cells = [source.history[number] for number in sorted({statement.cell for statement in chosen.statements})]
    return result


def _in_script(statement: Statement, namespace: dict[str, Any], train: frozenset[str]) -> str:
    """Functions, which the cell may call, have the loops of a script."""
    return marked(statement.text, namespace, train) if statement.defines else statement.text


def _divided(source: Source) -> tuple[list[Statement], str]:
    """The cell's statements up to the last one that makes a model or an optimizer before any loop, and the rest."""
    head: list[Statement] = []
    for statement in statements(source.number, source.cell, writes=True):
        if isinstance(statement.node, COMPOUND):
            break
        head.append(statement)
    while head and not any(isinstance(source.namespace.get(name), nn.Module | Optimizer) for name in head[-1].binds):
        head.pop()
    text = Edits(source.cell)
    end = text.place(head[-1].node.end_lineno, head[-1].node.end_col_offset) if head else 0
    return head, text.raw[end:].decode().lstrip(" ;")


def _prepared(source: Source, made: Made, texts: list[str]) -> list[str]:
    """Lines with which the cell begins: its models as the strategy has them, its loaders dealt out."""
    called = set().union(*(calls(ast.parse(text)) for text in texts))
    lines = [f"_MODELS, torch.utils.data.DataLoader.__iter__ = {made.models!r}, _loop"]
    strategy = source.run.strategy
    if "len(" in "\n".join(texts):
        lines.append("torch.utils.data.DataLoader.__len__ = _length")
    for name in made.modules:
        optimizers = [optimizer for optimizer, of in made.trained.items() if name in of]
        if strategy == "deepspeed" and optimizers:
            lines.append(f"{name}, {optimizers[0]} = _engine({name}, {optimizers[0]})")
            continue
        methods = _methods(source.namespace[name], called) if strategy in ("ddp", "zero1") else ()
        lines.append(f"_prepared({', '.join([name, *optimizers])}{f', methods={methods!r}' if methods else ''})")
    for name in made.optimizers if strategy == "zero1" else ():
        lines.append(f"{name} = _divided({', '.join([name, *made.schedules_of(name)])})")
    return lines


def _methods(model: nn.Module, called: set[str]) -> tuple[str, ...]:
    """Its own methods that are called, but for those that train by themselves, and call the model."""
    functions = {name: getattr(type(model), name, None) for name in sorted(called) if not hasattr(nn.Module, name)}
    return tuple(
        name for name, function in functions.items()
        if isinstance(function, FunctionType) and not function.__module__.startswith("torch.")
        and not TRAINS & {*function.__code__.co_names}
    )  # fmt: skip


def _end(source: Source, made: Made) -> str:
    """The weights are saved, and said to be as large as the notebook's."""
    away = source.run.background or not source.latest or not {*made.models}.isdisjoint(source.run.keep)
    models = {name: source.namespace[name] for name in made.models}
    if source.run.strategy in ("fsdp", "deepspeed"):
        return strategy_code.END + LEAVE.lstrip("\n")
    norms = {name: "not measured" if away else _norm(model) for name, model in models.items()}
    end = strategy_code.END.replace("_weights(globals()[name])", "globals()[name].state_dict()")
    return "".join(part.lstrip("\n") for part in (end, strategy_code.NORMS.replace("{norms}", repr(norms)), LEAVE))


def _norm(model: nn.Module) -> str:
    return f"{sum(p.detach().double().square().sum().item() for p in model.parameters()) ** 0.5:.6g}"


def _refuse_names_of_the_script(own: list[str], bound: frozenset[str], namespace: dict[str, Any]) -> None:
    used = set().union(*(analyse(text).writes for text in own)) - {"print"}
    for name in sorted(used & bound):
        if getattr(namespace.get(name), "__name__", "") != name:  # it is not the same module
            raise NotSupported(f"export: {name} is a name of the script's own: give yours another name")


def write(path: Path, text: str, saved: dict[str, Any], objects: Path) -> None:
    try:  # with --force there is another script, which stays where there is no room for this one
        with replacing(path) as script:
            Path(script).write_text(text)
            if saved:
                with replacing(objects) as beside, telling_of_a_full_disk(str(objects)):
                    torch.save(saved, beside)
    except OSError as error:
        raise UsageError(f"export: {path} is not written: {error.strerror or error}") from error
