"""Loads a checkpoint into objects on any number of ranks: in place, each rank its pieces, one tensor at a time.

Whether the checkpoint is of these objects is found out before any of them is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from nbtrain.base.errors import UsageError
from nbtrain.compat.modules import EXTRA_STATE
from nbtrain.strategies.base import Piece
from nbtrain.worker.checkpoints.content import CheckpointObjects, Name, ParameterNames, entries, is_reference, whole
from nbtrain.worker.checkpoints.open_checkpoint import CheckpointSource

Pieces = dict[int, Piece]
"""id of a tensor → what this rank keeps of it"""

SHOWN = 4
WORDS = {"modules": "model", "optimizers": "optimizer", "schedulers": "scheduler"}


@dataclass(slots=True)
class Match:
    """The checkpoint's name for each of our objects."""

    modules: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, str] = field(default_factory=dict)
    schedulers: dict[str, str] = field(default_factory=dict)

    def ours(self, name: Name) -> Name:
        """What a parameter of the checkpoint's is called here."""
        owner, path = name
        return next((mine for mine, theirs in self.modules.items() if theirs == owner), owner), path


def compare(source: CheckpointSource, objects: CheckpointObjects, names: ParameterNames, asked: bool) -> Match:
    """Raise with the first keys and shapes that differ. `asked`: the user named the objects; otherwise those that the
    checkpoint lacks keep what they have."""
    match = Match()
    for kind, table in objects.kinds():
        getattr(match, kind).update(_pair(source, WORDS[kind], table, source.tree[kind], asked))
    if not (match.modules or match.optimizers or match.schedulers):
        mine = [name for _, table in objects.kinds() for name in table] or ["no model, optimizer or scheduler"]
        raise UsageError(f"{source.path} has nothing of what it is loaded into ({', '.join(mine)})")
    differences: list[str] = []
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
    """Pair objects by name; if the names differ but there is only one of each, pair those."""
    left, there = list(mine), list(theirs)
    pairs = {name: name for name in left if name in there}
    left = [name for name in left if name not in pairs]
    rest = [name for name in there if name not in pairs]
    if len(left) == len(rest) == 1 and (not pairs or len(there) == len(pairs) + 1):
        pairs[left[0]] = rest[0]
    elif left and (asked or rest):
        has = f"{word}s {', '.join(map(repr, there))}" if there else f"no {word}"
        raise UsageError(
            f"{source.path} has {has}, and nothing for {', '.join(left)}. Say which is which: "
            f"load(path, {there[0] if there and there[0].isidentifier() else word}={left[0]}). Nothing was changed"
        )
    return pairs


def _modules(name: str, module: torch.nn.Module, source: CheckpointSource, theirs: str) -> list[str]:
    here = {path: value for path, value in entries(module).items() if isinstance(value, torch.Tensor)}
    there: Mapping[str, str] = source.tree["modules"][theirs]["tensors"]
    differences = []
    for path, value in here.items():
        if path not in there:
            differences.append(f"{name}.{path} {tuple(value.shape)} is not there")
            continue
        info = source.described[there[path]]
        if tuple(value.shape) != info.shape:
            differences.append(f"{name}.{path} is {info.shape} there and {tuple(value.shape)} here")
        elif value.dtype.is_floating_point != info.dtype.is_floating_point:
            differences.append(f"{name}.{path} is {_word(info.dtype)} there and {_word(value.dtype)} here")
    differences += [
        f"{name} has no {path} {source.described[key].shape}" for path, key in there.items() if path not in here
    ]
    return differences


def _optimizers(
    name: str,
    optimizer: Optimizer,
    names: ParameterNames,
    source: CheckpointSource,
    theirs: str,
    match: Match,
) -> list[str]:
    tree = source.tree["optimizers"][theirs]
    if tree["class"] != type(optimizer).__name__:
        return [f"{name} is {tree['class']} there and {type(optimizer).__name__} here"]
    called = names.of(optimizer)
    here = [[called[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [[match.ours(parameter_there) for parameter_there in group["params"]] for group in tree["groups"]]
    if len(here) != len(there):
        return [f"{name} has {len(there)} groups of parameters there and {len(here)} here"]
    differences = []
    for i, (mine, others) in enumerate(zip(here, there, strict=True)):
        which = f"group {i} of {name}" if len(here) > 1 else name
        mine_set, others_set = set(mine), set(others)
        differences += [
            f"{which} has no {_dotted(parameter)} there" for parameter in mine if parameter not in others_set
        ]
        differences += [
            f"{which} has no {_dotted(parameter)} here" for parameter in others if parameter not in mine_set
        ]
    parameters = _parameters(optimizer, names)
    for path, key in tree["loose"].items():
        if (p := parameters.get(("", path))) is not None and tuple(p.shape) != source.described[key].shape:
            differences.append(
                f"parameter {path} of {name} is {source.described[key].shape} there and {tuple(p.shape)} here"
            )
    return differences


def _dotted(name: Name) -> str:
    return ".".join(filter(None, name)) if name[0] else f"parameter {name[1]}"


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class Restore:
    """One load of a checkpoint into these objects."""

    def __init__(
        self, source: CheckpointSource, objects: CheckpointObjects, names: ParameterNames, match: Match
    ) -> None:
        self.source = source
        self.objects = objects
        self.names = names
        self.match = match
        self._read = source.read
        self._pieces: Pieces = {}
        self._filled: set[int] = set()

    def make_state(self, pieces: Pieces) -> None:
        """Make the states that an optimizer lacks, in pieces like its parameters' where those are DTensors: so a model
        that no rank can hold goes on after the kernel was started anew."""
        for optimizer, group, p, there in self._states():
            tensors = {key: self.source.described[value[1]] for key, value in there.items() if is_reference(value)}
            if optimizer.state.get(p) or id(p) not in pieces or not hasattr(p, "placements"):
                continue
            if any(info.shape != tuple(p.shape) and info.numel != 1 for info in tensors.values()):
                continue  # nobody knows how that is cut
            for key, info in tensors.items():
                if info.shape == tuple(p.shape):
                    made = torch.zeros_like(p, dtype=info.dtype, requires_grad=False)
                else:
                    device = p.device if _counts_on_device(group) else "cpu"
                    made = torch.zeros(info.shape, dtype=info.dtype, device=device)
                optimizer.state[p][key] = made

    def same_state(self, pieces: Pieces) -> bool:
        """Whether optimizers of parameters in pieces hold the same states as the checkpoint. If not, the strategy has
        to make their states first."""
        for optimizer, _, p, there in self._states():
            here = optimizer.state.get(p) or {}
            if not (id(p) in pieces or any(id(value) in pieces for value in here.values())):
                continue
            tensors = {key: value for key, value in here.items() if isinstance(value, torch.Tensor)}
            if tensors.keys() != {key for key, value in there.items() if is_reference(value)}:
                return False
            if any(
                tuple(tensor.shape) != self.source.described[there[key][1]].shape for key, tensor in tensors.items()
            ):
                return False
        return True

    @torch.no_grad()
    def restore(self, read: Callable[[str], torch.Tensor], pieces: Pieces) -> None:
        """Fill the objects. `read` returns a tensor of the checkpoint by its key."""
        self._read, self._pieces = read, pieces
        for mine, theirs in self.match.modules.items():
            self._module(self.objects.modules[mine], self.source.tree["modules"][theirs])
        for mine, theirs in self.match.optimizers.items():
            self._options(self.objects.optimizers[mine], self.source.tree["optimizers"][theirs])
        for optimizer, group, p, there in self._states():
            self._state(optimizer, group, p, there)
        for mine, theirs in self.match.schedulers.items():
            state = whole(self.source.tree["schedulers"][theirs]["state"], read)
            self.objects.schedulers[mine].load_state_dict(state)

    def _states(self) -> Iterator[tuple[Optimizer, dict[str, Any], torch.Tensor, dict[str, Any]]]:
        """(optimizer, group, parameter, the checkpoint's state for it)"""
        for mine, theirs in self.match.optimizers.items():
            optimizer, states = self.objects.optimizers[mine], self.source.tree["optimizers"][theirs]["state"]
            called = self.names.of(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    owner, path = called[id(p)]
                    yield optimizer, group, p, states.get((self.match.modules.get(owner, owner), path), {})

    def _fill(self, tensor: torch.Tensor, key: str) -> None:
        if id(tensor) in self._filled:
            return
        self._filled.add(id(tensor))
        content = self._read(key)
        piece = self._pieces.get(id(tensor))
        if piece is None:
            tensor.detach().copy_(content)
        else:
            piece.fill(content.to(piece.dtype))

    def _module(self, module: torch.nn.Module, tree: dict[str, Any]) -> None:
        for path, value in entries(module).items():
            if isinstance(value, torch.Tensor):
                self._fill(value, tree["tensors"][path])
        for path, value in tree["extra"].items():
            if path.rpartition(".")[2] == EXTRA_STATE:
                module.get_submodule(path.rpartition(".")[0]).set_extra_state(whole(value, self._read))

    def _options(self, optimizer: Optimizer, tree: dict[str, Any]) -> None:
        """The options of an optimizer's groups, and the parameters that no module owns."""
        for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
            for key in [key for key in group if key != "params" and key not in saved["options"]]:
                del group[key]
            for key, value in saved["options"].items():
                self._put(group, key, value)
        parameters = _parameters(optimizer, self.names)
        for path, key in tree["loose"].items():
            self._fill(parameters["", path], key)

    def _state(self, optimizer: Optimizer, group: dict[str, Any], p: torch.Tensor, there: dict[str, Any]) -> None:
        if not there:
            optimizer.state.pop(p, None)
            return
        state = optimizer.state[p]
        for key in [key for key in state if key not in there]:
            del state[key]
        for key, value in there.items():
            self._put(state, key, value, p if key != "step" or _counts_on_device(group) else None)

    def _put(self, holder: Any, key: Any, value: Any, like: torch.Tensor | None = None) -> None:
        """`like`: the tensor on whose device new ones are made."""
        if is_reference(value):
            tensor = holder.get(key)
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == self.source.described[value[1]].shape:
                self._fill(tensor, value[1])
                return
        holder[key] = whole(value, lambda at: self._read(at) if like is None else self._read(at).to(like.device))


def _counts_on_device(group: dict[str, Any]) -> bool:
    """Whether its step counts are on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def _parameters(optimizer: Optimizer, names: ParameterNames) -> dict[Name, torch.Tensor]:
    called = names.of(optimizer)
    return {called[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
