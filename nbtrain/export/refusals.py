"""What a script would train otherwise, or could not run, and so is no script."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from nbtrain.errors import NotSupported
from nbtrain.export.definitions import Made
from nbtrain.export.needed_statements import Slice, statements
from nbtrain.export.source import Source

OF_A_RANK = frozenset({"load", "setup", "on_each_rank"})
"""what a cell may call on a rank, and has no plain form"""


def _run_on_ranks(source: Source, found: Slice) -> Iterator[str]:
    """The texts that run with prepared models: what stands before the cell does the same on all processes."""
    yield source.cell
    yield from (one.text for one in found.statements if isinstance(one.node, ast.FunctionDef | ast.ClassDef))


def refuse_what_is_of_nbtrain(source: Source, found: Slice) -> None:
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


def refuse_what_is_not_prepared(source: Source, found: Slice) -> None:
    """Models are prepared where a statement makes them: what trains out of its sight would train on each process."""
    for text in _run_on_ranks(source, found):
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
            raise NotSupported(f"export: the notebook no longer has {name}: export a cell while its names are there")
        if isinstance(value, DataLoader) and isinstance(value.dataset, IterableDataset):
            raise NotSupported(
                f"export: {name} is a stream, which a script cannot deal out without nbtrain: let the data set take "
                "its own part, itertools.islice(…, rank, None, world_size), or have a data set with indices"
            )


def refuse_unprepared(source: Source, made: Made, deals: bool) -> None:
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


def refuse_calls_of_parts(source: Source, found: Slice) -> None:
    """DistributedDataParallel averages the gradients of a model that is called, not of a part of it."""
    for text in _run_on_ranks(source, found):
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
