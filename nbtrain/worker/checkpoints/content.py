"""What is saved of models, optimizers and schedulers, and by which rank: a tree of plain values, and the tensors it
refers to by key.

Parameters have the names that the modules give them, never indices or ids: those mean something else under another
strategy, and after a layer was added. A tensor that has two names (tied weights) is one tensor with one key.

What every rank has whole is written by one of them, the bytes spread evenly. What is kept in pieces is written by who
keeps it; of several that keep the same, by the first. So nobody ever holds more than it does already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.compat.modules import uncompiled_path
from nbtrain.strategies.base import Piece, is_lazy

TENSOR = "nbtrain:tensor"
"""(TENSOR, key) stands for a tensor in a tree."""
Name = tuple[str, str]
"""A parameter's: the name of the module that owns it, and its path there; "" and its number if it has no module."""
Range = tuple[int, int]
"""(start, stop) in the flattened whole"""
Kept = Mapping[str, Sequence[Range]]
"""key → what a rank keeps of it"""


@dataclass(slots=True)
class CheckpointObjects:
    """What is saved or loaded, by the notebook's names."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> CheckpointObjects:
        objects = cls()
        seen: set[int] = set()
        for name, item in named.items():
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, nn.Module):
                if next(item.parameters(), None) is not None or next(item.buffers(), None) is not None:
                    objects.modules[name] = item
            elif isinstance(item, Optimizer):
                objects.optimizers[name] = item
            elif isinstance(item, LRScheduler):
                objects.schedulers[name] = item
        parts = {id(part) for module in objects.modules.values() for part in list(module.modules())[1:]}
        objects.modules = {name: module for name, module in objects.modules.items() if id(module) not in parts}
        return objects

    def __bool__(self) -> bool:
        return bool(self.modules or self.optimizers or self.schedulers)

    def kinds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "modules", self.modules
        yield "optimizers", self.optimizers
        yield "schedulers", self.schedulers

    def all(self) -> list[Any]:
        return [item for _, table in self.kinds() for item in table.values()]


def entries(module: nn.Module) -> dict[str, Any]:
    """The module's state dict with the tensors themselves in it."""
    return {uncompiled_path(path): value for path, value in module.state_dict(keep_vars=True).items()}


class ParameterNames:
    """Names of parameters: from the modules that are saved with them, else from any other that is known."""

    def __init__(self, *tables: Mapping[str, nn.Module]) -> None:
        self.known: dict[int, Name] = {}
        for table in tables:
            for owner, module in table.items():
                for path, parameter in module.named_parameters(remove_duplicate=False):
                    self.known.setdefault(id(parameter), (owner, uncompiled_path(path)))

    def of(self, optimizer: Optimizer) -> dict[int, Name]:
        """id → name, of every parameter that it holds."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {id(p): self.known.get(id(p), ("", str(i))) for i, p in enumerate(parameters)}


@dataclass(slots=True)
class Content:
    """`tree`: modules, optimizers, schedulers. `tensors`: those that it refers to, under the same keys, in the same
    order, on every rank."""

    tree: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _keys: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: CheckpointObjects, names: ParameterNames) -> Content:
        made = cls()
        made.tree = {
            "modules": {name: made._module(name, module) for name, module in objects.modules.items()},
            "optimizers": {
                name: made._optimizer(name, optimizer, names) for name, optimizer in objects.optimizers.items()
            },
            "schedulers": {
                name: {
                    "class": type(scheduler).__name__,
                    "state": made._take(f"scheduler/{name}", scheduler.state_dict()),
                }
                for name, scheduler in objects.schedulers.items()
            },
        }
        return made

    def described(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """key → shape and dtype"""
        return {key: (tuple(t.shape), str(t.dtype)) for key, t in self.tensors.items()}

    def _module(self, name: str, module: nn.Module) -> dict[str, Any]:
        tensors, extra = {}, {}
        for path, value in entries(module).items():
            if not isinstance(value, torch.Tensor):
                extra[path] = self._take(f"model/{name}/{path}", value)
            elif is_lazy(value):
                raise UsageError(
                    f"{name}.{path} has no shape yet: a lazy layer gets its own with the first batch. Save after that"
                )
            else:
                tensors[path] = self._add(f"model/{name}/{path}", value)
        return {"class": type(module).__name__, "tensors": tensors, "extra": extra}

    def _optimizer(self, name: str, optimizer: Optimizer, names: ParameterNames) -> dict[str, Any]:
        called = names.of(optimizer)
        groups: list[dict[str, Any]] = []
        state: dict[Name, dict[str, Any]] = {}
        loose: dict[str, str] = {}
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            at = f"optimizer/{name}/group {len(groups)}"
            groups.append({"options": self._take(at, options), "params": [called[id(p)] for p in group["params"]]})
            for p in group["params"]:
                owner, path = called[id(p)]
                if not owner:
                    loose[path] = self._add(f"optimizer/{name}/parameter {path}", p)
                if held := optimizer.state.get(p):
                    state[owner, path] = {
                        key: self._take(f"optimizer/{name}/{key}/{owner}/{path}", value) for key, value in held.items()
                    }
        return {"class": type(optimizer).__name__, "groups": groups, "state": state, "loose": loose}

    def _take(self, at: str, value: Any) -> Any:
        """The value with references in place of its tensors."""
        if isinstance(value, torch.Tensor):
            return TENSOR, self._add(at, value)
        if isinstance(value, dict):
            return _plain_dict({key: self._take(f"{at}/{key}", part) for key, part in value.items()}, value)
        if type(value) in (list, tuple):
            return type(value)(self._take(f"{at}/{i}", part) for i, part in enumerate(value))
        return value

    def _add(self, key: str, tensor: torch.Tensor) -> str:
        known = self._keys.get(id(tensor))
        if known is not None:
            return known
        self._keys[id(tensor)] = key
        self.tensors[key] = tensor
        return key


def _plain_dict(parts: dict[Any, Any], like: dict[Any, Any]) -> Any:
    """A Counter or an OrderedDict stays one, if it can be made from a dict."""
    try:
        return type(like)(parts)
    except TypeError:
        return parts


def is_reference(value: Any) -> bool:
    """Whether this part of a tree stands for a tensor."""
    return isinstance(value, tuple) and len(value) == 2 and value[0] == TENSOR


def whole(tree: Any, read: Any) -> Any:
    """The tree with its tensors again; `read(key)` returns one."""
    if is_reference(tree):
        return read(tree[1])
    if isinstance(tree, dict):
        return _plain_dict({key: whole(part, read) for key, part in tree.items()}, tree)
    if type(tree) in (list, tuple):
        return type(tree)(whole(part, read) for part in tree)
    return tree


# --- which rank writes what ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a tensor in the notebook."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RankPart:
    """A stretch of a flattened tensor, in host memory."""

    key: str
    start: int
    data: torch.Tensor


@dataclass(slots=True)
class Holdings:
    """What this rank has of the content, after `leave`."""

    tensors: Mapping[str, torch.Tensor]
    pieces: dict[str, Piece] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], pieces: Mapping[int, Piece]) -> Holdings:
        """`pieces`: by the ids of their tensors."""
        return cls(tensors, {key: pieces[id(tensor)] for key, tensor in tensors.items() if id(tensor) in pieces})

    def described(self) -> dict[str, TensorInfo]:
        infos = {}
        for key, tensor in self.tensors.items():
            piece = self.pieces.get(key)
            infos[key] = TensorInfo(tuple(tensor.shape if piece is None else piece.shape), (piece or tensor).dtype)
        return infos

    def kept(self) -> dict[str, list[Range]]:
        return {key: [(int(a), int(b)) for a, b in piece.ranges()] for key, piece in self.pieces.items()}


def owners(described: Mapping[str, TensorInfo], kept: Sequence[Kept]) -> list[dict[str, list[Range]]]:
    """Decide what each rank writes, with the same result on every rank."""
    mine: list[dict[str, list[Range]]] = [{} for _ in kept]
    load = [0] * len(kept)
    in_pieces = {key for kept_by_rank in kept for key in kept_by_rank}
    for key in in_pieces & described.keys():
        info = described[key]
        taken: list[Range] = []
        for rank, ranges in enumerate(kept):
            fresh = [part for span in ranges.get(key, ()) for part in _without(span, taken)]
            if fresh:
                mine[rank][key] = fresh
                taken += fresh
                load[rank] += sum(b - a for a, b in fresh) * info.dtype.itemsize
        if sum(b - a for a, b in taken) != info.numel:
            raise NbtrainError(
                f"{key}: of its {info.numel:,} numbers the ranks keep {sum(b - a for a, b in taken):,} only. "
                "The strategy does not say where the others are, so this cannot be saved"
            )
    for key in sorted(described.keys() - in_pieces, key=lambda key: (-described[key].nbytes, key)):
        if described[key].numel:
            rank = load.index(min(load))
            mine[rank][key] = [(0, described[key].numel)]
            load[rank] += described[key].nbytes
    return mine


def _without(span: Range, taken: Iterable[Range]) -> list[Range]:
    """What is left of `held` without `taken`."""
    left = [span] if span[1] > span[0] else []
    for a, b in taken:
        left = [part for c, d in left for part in ((c, min(d, a)), (max(c, b), d)) if part[1] > part[0]]
    return left


@torch.no_grad()
def snapshot(holdings: Holdings, mine: Mapping[str, Sequence[Range]]) -> list[RankPart]:
    """Copies of what this rank writes: the training goes on while they are written."""
    parts = []
    for key, ranges in mine.items():
        piece = holdings.pieces.get(key)
        if piece is None:
            data = holdings.tensors[key].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            parts.append(RankPart(key, 0, data.reshape(-1)))
            continue
        for (a, b), data in zip(piece.ranges(), piece.read(), strict=True):
            for start, stop in ranges:
                if a <= start and stop <= b:
                    part = data.detach()[start - a : stop - a]
                    parts.append(RankPart(key, start, part.to(device="cpu", dtype=piece.dtype, copy=True)))
    return parts
