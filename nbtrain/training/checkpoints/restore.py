"""Loads a checkpoint into objects on any number of ranks: in place, each rank its pieces, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nbtrain.compat.modules import EXTRA_STATE
from nbtrain.strategies.base import Piece
from nbtrain.training.checkpoints.content import CheckpointObjects, Name, ParameterNames, entries, is_reference, whole
from nbtrain.training.checkpoints.find_source import CheckpointSource
from nbtrain.training.checkpoints.matches_objects import Match

Pieces = dict[int, Piece]
"""id of a tensor → what this rank keeps of it"""
Held = dict[Name, torch.Tensor]


def make_state(
    source: CheckpointSource, objects: CheckpointObjects, names: ParameterNames, match: Match, pieces: Pieces
) -> None:
    """Make the states that an optimizer lacks, in pieces like its parameters' where those are DTensors: so a model that
    no rank can hold goes on after the kernel was started anew."""
    for mine, theirs in match.optimizers.items():
        optimizer, tree = objects.optimizers[mine], source.tree["optimizers"][theirs]
        for name, p in _parameters(optimizer, names).items():
            there = _state_of(tree, name, match)
            tensors = {key: source.described[value[1]] for key, value in there.items() if is_reference(value)}
            if optimizer.state.get(p) or id(p) not in pieces or not hasattr(p, "placements"):
                continue
            if any(one.shape != tuple(p.shape) and one.numel != 1 for one in tensors.values()):
                continue  # nobody knows how that is cut
            on_device = _counts_on_device(_group_of(optimizer, p))
            for key, one in tensors.items():
                if one.shape == tuple(p.shape):
                    made = torch.zeros_like(p, dtype=one.dtype, requires_grad=False)
                else:
                    made = torch.zeros(one.shape, dtype=one.dtype, device=p.device if on_device else "cpu")
                optimizer.state[p][key] = made


def same_state(
    source: CheckpointSource, objects: CheckpointObjects, names: ParameterNames, match: Match, pieces: Pieces
) -> bool:
    """Whether optimizers of parameters in pieces hold the same states as the checkpoint. If not, the strategy has to
    make their states first."""
    for mine, theirs in match.optimizers.items():
        optimizer, tree = objects.optimizers[mine], source.tree["optimizers"][theirs]
        for name, p in _parameters(optimizer, names).items():
            here = optimizer.state.get(p) or {}
            there = _state_of(tree, name, match)
            if not (id(p) in pieces or any(id(value) in pieces for value in here.values())):
                continue
            if _tensors(here) != {key for key, value in there.items() if is_reference(value)}:
                return False
            for key, value in here.items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) != source.described[there[key][1]].shape:
                    return False
    return True


class Restore:
    """One load."""

    def __init__(
        self,
        source: CheckpointSource,
        read: Callable[[str], torch.Tensor],
        pieces: Pieces,
        names: ParameterNames,
        match: Match,
    ) -> None:
        self.source = source
        self.read = read
        self.pieces = pieces
        self.names = names
        self.match = match
        self._filled: set[int] = set()

    @torch.no_grad()
    def restore(self, objects: CheckpointObjects) -> None:
        for mine, theirs in self.match.modules.items():
            self._module(objects.modules[mine], self.source.tree["modules"][theirs])
        for mine, theirs in self.match.optimizers.items():
            self._optimizer(objects.optimizers[mine], self.source.tree["optimizers"][theirs])
        for mine, theirs in self.match.schedulers.items():
            state = whole(self.source.tree["schedulers"][theirs]["state"], self.read)
            objects.schedulers[mine].load_state_dict(state)

    def _fill(self, tensor: torch.Tensor, key: str) -> None:
        if id(tensor) in self._filled:
            return
        self._filled.add(id(tensor))
        content = self.read(key)
        piece = self.pieces.get(id(tensor))
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
                module.get_submodule(path.rpartition(".")[0]).set_extra_state(whole(value, self.read))

    def _optimizer(self, optimizer: Optimizer, tree: dict[str, Any]) -> None:
        for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
            for key in [key for key in group if key != "params" and key not in saved["options"]]:
                del group[key]
            for key, value in saved["options"].items():
                self._put(group, key, value)
        parameters = _parameters(optimizer, self.names)
        for path, key in tree["loose"].items():
            self._fill(parameters["", path], key)
        for name, p in parameters.items():
            there = _state_of(tree, name, self.match)
            if not there:
                optimizer.state.pop(p, None)
                continue
            state = optimizer.state[p]
            for key in [key for key in state if key not in there]:
                del state[key]
            on_device = _counts_on_device(_group_of(optimizer, p))
            for key, value in there.items():
                self._put(state, key, value, p if key != "step" or on_device else None)

    def _put(self, holder: Any, key: Any, value: Any, like: torch.Tensor | None = None) -> None:
        """`like`: the tensor on whose device a new one is made."""
        if not is_reference(value):
            made = whole(value, self.read)
            holder[key] = _onto(made, like.device) if like is not None else made
            return
        tensor = holder.get(key)
        shape = self.source.described[value[1]].shape
        if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape:
            self._fill(tensor, value[1])
        else:
            content = self.read(value[1])
            holder[key] = content.to(like.device) if like is not None else content


def _group_of(optimizer: Optimizer, p: torch.Tensor) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(one is p for one in group["params"]))


def _counts_on_device(group: dict[str, Any]) -> bool:
    """Whether its step counts are on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def _parameters(optimizer: Optimizer, names: ParameterNames) -> Held:
    called = names.of(optimizer)
    return {called[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def _state_of(tree: dict[str, Any], name: Name, match: Match) -> dict[str, Any]:
    """The checkpoint's state for the parameter of this name here."""
    owner, path = name
    found: dict[str, Any] = tree["state"].get((match.modules.get(owner, owner), path), {})
    return found


def _tensors(state: dict[str, Any]) -> set[str]:
    return {key for key, value in state.items() if isinstance(value, torch.Tensor)}


def _onto(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _onto(part, device) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_onto(part, device) for part in tree)
    return tree
