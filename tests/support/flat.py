"""A strategy for tests that keeps everything in flat pieces, as ZeRO does, and computes as `ddp`: parameters and what
an optimizer remembers of them are whole while a cell runs, and of no use between cells but for this rank's stretch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.strategies.base import Component, Piece, Prepared, Shards, Strategy
from nbtrain.strategies.kit.gradient_buckets import AllReduce
from nbtrain.strategies.kit.replicated import Replicated


class Stretch(Piece):
    def __init__(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.start, self.stop = start, stop
        self.kept = tensor.detach().reshape(-1)[start:stop].clone()

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(self.start, self.stop)] if self.stop > self.start else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self.kept] if self.stop > self.start else []

    def fill(self, whole: torch.Tensor) -> None:
        assert whole.shape == self.shape
        assert whole.dtype == self.dtype
        self.kept.copy_(whole.reshape(-1)[self.start : self.stop])


class Flat(Replicated, Shards):
    def __init__(self, component: Component) -> None:
        super().__init__(component, 25, AllReduce())
        self.held: list[tuple[torch.Tensor, Stretch]] = []
        self.cut()

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.component.parameters()
        for optimizer in self.component.optimizers.values():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    for value in (optimizer.state.get(p) or {}).values():
                        if isinstance(value, torch.Tensor) and value.shape == p.shape:
                            yield value

    def cut(self) -> None:
        """One flat vector of everything, each rank an equal stretch of it: cuts fall anywhere in a tensor."""
        self.held = []
        tensors = list(self.tensors())
        total = sum(t.numel() for t in tensors)
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = (total * rank // world, total * (rank + 1) // world)
        at = 0
        for tensor in tensors:
            a, b = (min(max(edge - at, 0), tensor.numel()) for edge in mine)
            self.held.append((tensor, Stretch(tensor, a, b)))
            at += tensor.numel()
            tensor.detach().fill_(float("nan"))  # whoever reads it will be noticed

    def leave(self, pause: bool = False) -> None:
        if not self.held:
            self.cut()

    def enter(self) -> None:
        for tensor, piece in self.held:
            whole = torch.zeros(tensor.numel(), dtype=tensor.dtype)
            whole[piece.start : piece.stop] = piece.kept
            dist.all_reduce(whole)
            tensor.detach().copy_(whole.view(tensor.shape))
        self.held = []

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        yield from self.held

    def close(self, whole: bool = True) -> None:
        if whole:
            self.enter()
        super().close()


class FlatPieces(Strategy):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        pass

    def set_up(self, component: Component, precision: str = "32") -> Any:
        return Prepared(component) if not dist.is_initialized() else Flat(component)
