"""Whether a checkpoint is of these objects: found out before any of them is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbtrain.errors import UsageError
from nbtrain.training.checkpoints.content import CheckpointObjects, Name, ParameterNames, entries
from nbtrain.training.checkpoints.find_source import CheckpointSource

SHOWN = 4
WORDS = {"modules": "model", "optimizers": "optimizer", "schedulers": "scheduler"}


@dataclass(slots=True)
class Match:
    """Per kind, which of the checkpoint's each of ours is."""

    modules: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, str] = field(default_factory=dict)
    schedulers: dict[str, str] = field(default_factory=dict)

    def ours(self, name: Name) -> Name:
        """What a parameter of the checkpoint's is called here."""
        owner, path = name
        return next((mine for mine, theirs in self.modules.items() if theirs == owner), owner), path


def compare(source: CheckpointSource, objects: CheckpointObjects, names: ParameterNames, asked: bool) -> Match:
    """Raises with the first keys and shapes that differ. `asked`: the user named the objects; else those that the
    checkpoint does not have keep what they have."""
    match = Match()
    for kind, mine in objects.kinds():
        getattr(match, kind).update(_pair(source, WORDS[kind], mine, source.tree[kind], asked))
    if not (match.modules or match.optimizers or match.schedulers):
        raise UsageError(f"{source.path} has nothing of what it is loaded into ({', '.join(_named(objects))})")
    differences: list[str] = []
    if source.elsewhere:
        for mine_name, theirs in match.modules.items():
            _below_its_name(objects.modules[mine_name], source.tree["modules"][theirs])
    for mine_name, theirs in match.modules.items():
        differences += _modules(mine_name, objects.modules[mine_name], source, theirs)
    for mine_name, theirs in match.optimizers.items():
        differences += _optimizers(mine_name, objects.optimizers[mine_name], names, source, theirs, match)
    for mine_name, theirs in match.schedulers.items():
        there, here = source.tree["schedulers"][theirs]["class"], type(objects.schedulers[mine_name]).__name__
        if there != here:
            differences.append(f"{mine_name} is a {there} there and a {here} here")
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise UsageError(
            f"the checkpoint {source.path} is of another model: {'; '.join(differences[:SHOWN])}{more}. "
            "Nothing was changed"
        )
    return match


def _pair(
    source: CheckpointSource, word: str, mine: Iterable[str], theirs: Iterable[str], asked: bool
) -> dict[str, str]:
    """By name; where the names differ, but there is one of each, by that."""
    left, there = list(mine), list(theirs)
    found = {name: name for name in left if name in there}
    left = [name for name in left if name not in found]
    rest = [name for name in there if name not in found]
    if len(left) == len(rest) == 1 and (not found or len(there) == len(found) + 1):
        found[left[0]] = rest[0]
    elif left and (asked or rest):
        has = f"{word}s {', '.join(map(repr, there))}" if there else f"no {word}"
        raise UsageError(
            f"{source.path} has {has}, and nothing for {', '.join(left)}. Say which is which: "
            f"load(path, {there[0] if there and there[0].isidentifier() else word}={left[0]}). Nothing was changed"
        )
    return found


def _below_its_name(module: torch.nn.Module, tree: dict[str, Any]) -> None:
    """It may have been a part of what was saved (`self.net` of a LightningModule): then its tensors are the part's."""
    here = {path for path, value in entries(module).items() if isinstance(value, torch.Tensor)}
    there: Mapping[str, str] = tree["tensors"]
    if not here or here <= there.keys():
        return
    one = min(here)
    prefixes = {path[: -len(one)] for path in there if path.endswith(f".{one}")}
    fitting = [prefix for prefix in prefixes if all(prefix + path in there for path in here)]
    if len(fitting) == 1:
        tree["tensors"] = {path: there[fitting[0] + path] for path in here}


def _modules(name: str, module: torch.nn.Module, source: CheckpointSource, theirs: str) -> list[str]:
    here = {path: value for path, value in entries(module).items() if isinstance(value, torch.Tensor)}
    there: Mapping[str, str] = source.tree["modules"][theirs]["tensors"]
    found = []
    for path, value in here.items():
        if path not in there:
            found.append(f"{name}.{path} {tuple(value.shape)} is not there")
            continue
        one = source.described[there[path]]
        if tuple(value.shape) != one.shape:
            found.append(f"{name}.{path} is {one.shape} there and {tuple(value.shape)} here")
        elif value.dtype.is_floating_point != one.dtype.is_floating_point:
            found.append(f"{name}.{path} is {_word(one.dtype)} there and {_word(value.dtype)} here")
    found += [f"{name} has no {path} {source.described[key].shape}" for path, key in there.items() if path not in here]
    return found


def _optimizers(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: ParameterNames,
    source: CheckpointSource,
    theirs: str,
    match: Match,
) -> list[str]:
    tree = source.tree["optimizers"][theirs]
    if tree["class"] != type(optimizer).__name__:
        return [f"{name} is {tree['class']} there and {type(optimizer).__name__} here"]
    called = names.of(optimizer)
    held = {called[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    here = [[called[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [[match.ours(one) for one in group["params"]] for group in tree["groups"]]
    if len(here) != len(there):
        return [f"{name} has {len(there)} groups of parameters there and {len(here)} here"]
    found = []
    for i, (mine, others) in enumerate(zip(here, there, strict=True)):
        which = f"group {i} of {name}" if len(here) > 1 else name
        mine_set, others_set = set(mine), set(others)
        found += [f"{which} has no {_dotted(one)} there" for one in mine if one not in others_set]
        found += [f"{which} has no {_dotted(one)} here" for one in others if one not in mine_set]
    for path, key in tree["loose"].items():
        if (p := held.get(("", path))) is not None and tuple(p.shape) != source.described[key].shape:
            found.append(f"parameter {path} of {name} is {source.described[key].shape} there and {tuple(p.shape)} here")
    return found


def _named(objects: CheckpointObjects) -> list[str]:
    return [name for _, table in objects.kinds() for name in table] or ["no model, optimizer or scheduler"]


def _dotted(name: Name) -> str:
    return ".".join(filter(None, name)) if name[0] else f"parameter {name[1]}"


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
