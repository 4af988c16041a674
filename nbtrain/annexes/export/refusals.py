"""What a script would train otherwise, or could not run, and so is no script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from nbtrain.annexes.export.loop_marks import calls
from nbtrain.annexes.export.source import Source
from nbtrain.annexes.export.statements import Kept, last_name, library
from nbtrain.annexes.export.strategy_code import USES
from nbtrain.base.errors import NotSupported
from nbtrain.exchange.names.cell_names import analyse

OF_A_RANK = frozenset({"load", "setup", "on_each_rank"})
"""what a cell may call on a rank, and has no plain form"""
LIGHTNINGS = re.compile(r"""['"]nbtrain_[a-z]""")
"""a strategy's name that Lightning has from nbtrain"""
WITH_ALL = frozenset({"ddp", "single"})
"""strategies under which every process has complete tensors, so that `with whole(…)` has one"""


class Made:
    """The models and optimizers that the cell uses, as they are in the notebook."""

    def __init__(self, namespace: Mapping[str, Any], used: Iterable[str]) -> None:
        self.namespace = namespace
        objects = {name: namespace[name] for name in used}
        modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        inner = {id(part) for module in modules.values() for part in module.modules() if part is not module}
        self.modules = [name for name, module in modules.items() if id(module) not in inner]
        self.models = [name for name in self.modules if next(modules[name].parameters(), None) is not None]
        """those with weights: not a loss"""
        self.optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        parameters = {name: {*map(id, modules[name].parameters())} for name in self.models}
        own = {
            name: {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, optimizer in self.optimizers.items()
        }  # fmt: skip
        self.trained = {name: [model for model in self.models if own[name] & parameters[model]] for name in own}
        """optimizer → the models whose parameters it has"""
        every = set().union(*parameters.values())
        self.loose = [name for name, of in own.items() if not of <= every]
        """optimizers with parameters that are in none of the models"""

    def schedules_of(self, optimizer: str) -> list[str]:
        own = self.optimizers[optimizer]
        return [
            name
            for name, schedule in self.namespace.items()
            if isinstance(schedule, LRScheduler) and schedule.optimizer is own
        ]

    def is_part(self, module: nn.Module, model: str) -> bool:
        outer = self.namespace[model]
        return module is not outer and any(part is module for part in outer.modules())

    def value(self, node: ast.AST) -> Any:
        """The notebook's object that a name, or a part of a model, is."""
        if isinstance(node, ast.Name):
            return self.namespace.get(node.id)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(of := self.value(node.value), nn.Module):
            index = node.slice if isinstance(node, ast.Subscript) else ast.Constant(node.attr)
            parts = dict(of.named_children())
            other = next(iter(parts.values()), None) if isinstance(node, ast.Subscript) else None
            return parts.get(str(getattr(index, "value", "")), other)
        return None


def refuse(source: Source, kept: Kept, made: Made, used: frozenset[str], train: frozenset[str]) -> None:
    """`used`: names of the notebook that the cell surely needs. `train`: functions that train."""
    texts = [
        source.cell,
        *(statement.text for statement in kept.statements if statement.defines),
    ]  # what runs with prepared models
    _refuse_what_is_of_nbtrain(source, kept, used)
    _refuse_what_is_not_there(source, kept)
    for text in texts:
        _refuse_calls(source, text)
        if source.run.strategy in ("ddp", "zero1"):
            _refuse_parts(text, made)
    _refuse_made_inside(source)
    _refuse_unprepared(source, made, bool(calls(ast.parse(source.cell)) & train))


def _refuse_what_is_of_nbtrain(source: Source, kept: Kept, used: frozenset[str]) -> None:
    for text in (source.cell, *(statement.text for statement in kept.statements)):
        if line := next(filter(LIGHTNINGS.search, text.splitlines()), None):
            raise NotSupported(f"export: `{line.strip()}` needs nbtrain: a script takes Lightning's own strategy='ddp'")
    reads = analyse(source.cell).reads.union(*(statement.reads for statement in kept.statements if statement.defines))
    given = {*OF_A_RANK, *(() if source.run.strategy in WITH_ALL else ("whole",))} - source.namespace.keys()
    own = {name for name in reads if name in given or library(source.namespace.get(name)) == "nbtrain"}
    lines = [line for name in sorted(own) for line in source.cell.splitlines() if re.search(rf"\b{name}\b", line)]
    lines += [kept.lost[name].text.splitlines()[0] for name in sorted(used & kept.lost.keys())] + sorted(own)
    if lines:
        raise NotSupported(f"export: `{lines[0].strip()}` needs nbtrain, which a script does without")


def _refuse_what_is_not_there(source: Source, kept: Kept) -> None:
    for name in sorted(analyse(source.cell).reads):
        value = source.namespace.get(name)
        if name not in {*source.namespace, *USES} and any(name in statement.binds for statement in kept.statements):
            raise NotSupported(f"export: the notebook no longer has {name}: export a cell while its names are there")
        if isinstance(value, DataLoader) and isinstance(value.dataset, IterableDataset):
            raise NotSupported(
                f"export: {name} is a stream, which a script cannot deal out without nbtrain: have a data set with "
                "indices"
            )


def _refuse_calls(source: Source, text: str) -> None:
    tree, strategy = ast.parse(text), source.run.strategy
    alone = {id(expression.value) for expression in ast.walk(tree) if isinstance(expression, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "state_dict" and strategy == "fsdp":
            raise NotSupported(
                "export: under fsdp state_dict() has the pieces of one process: call save(path), which writes whole "
                "weights"
            )
        last = last_name(node) if isinstance(node, ast.Call) else ""
        if last == "grad" and ast.unparse(node).startswith(("torch.autograd.grad", "autograd.grad")):
            raise NotSupported(
                "export: what torch.autograd.grad gives is one process's own: add it up with dist.all_reduce in a "
                "script of your own"
            )
        clips = last == "clip_grad_value_" or (last == "clip_grad_norm_" and id(node) not in alone)
        if strategy == "deepspeed" and clips:
            raise NotSupported(
                f"export: {ast.unparse(node)}: DeepSpeed's engine clips by the norm of all gradients, in its step, and "
                "returns none; write clip_grad_norm_(model.parameters(), 1.0) as a statement, or take -s fsdp"
            )


def _refuse_parts(text: str, made: Made) -> None:
    """DistributedDataParallel averages the gradients of a model that is called, not of a part of it."""
    for call in ast.walk(ast.parse(text)):
        if isinstance(call, ast.Call) and isinstance(part := made.value(call.func), nn.Module):
            model = next((name for name in made.models if made.is_part(part, name)), None)
            if model is not None:
                raise NotSupported(
                    f"export: `{ast.unparse(call.func)}(…)` calls a part of a model, and DistributedDataParallel "
                    f"averages the gradients of one that is called whole: give {type(made.namespace[model]).__name__} "
                    "a method that does it, or take -s fsdp --wrap"
                )


def _refuse_made_inside(source: Source) -> None:
    for node in ast.walk(ast.parse(source.cell)):
        for inner in ast.walk(node) if isinstance(node, ast.For | ast.While | ast.If | ast.Try | ast.With) else ():
            name = inner.id if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) else ""
            if isinstance(source.namespace.get(name), nn.Module | Optimizer):
                raise NotSupported(
                    f"export: the cell makes {name} in a `{type(node).__name__.lower()}`: a script prepares models "
                    "where a statement of its own makes them; make it before"
                )


def _refuse_unprepared(source: Source, made: Made, trains: bool) -> None:
    if not made.models and trains:
        raise NotSupported(
            "export: a script prepares the models that are names of the notebook, and this cell trains none of those: "
            "bind the model to a name in a cell, and use that name"
        )
    if source.run.pool.world_size > 1 and made.loose:
        raise NotSupported(
            f"export: {made.loose[0]} trains parameters that are in no model which is a name of the notebook, so "
            "nobody would average their gradients: put them into the model"
        )
    if source.run.strategy == "deepspeed" and [*map(len, made.trained.values())] != [1]:
        raise NotSupported("export: DeepSpeed's engine has one model and its optimizer: take -s fsdp")
