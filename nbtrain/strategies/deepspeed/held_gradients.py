"""The gradients that one engine holds between a backward and a step: read, written, averaged and clipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from nbtrain.compat import deepspeed as ds
from nbtrain.strategies.deepspeed.engine_layout import SharePart
from nbtrain.strategies.deepspeed.engine_parts import EngineParts
from nbtrain.strategies.deepspeed.stand_ins import HeldGradient
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.owned_tensors import full_tensor


class HeldGradients:
    """Their numbers. Which of them a cell has is in gradients.py."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts, self.engine, self.layout, self.trained = parts, parts.engine, parts.layout, parts.trained
        self.zero = parts.engine.optimizer
        self.some = False
        """some backward has left gradients with the engine"""
        self.arrived: set[int] = set()
        """ids of the parameters of which it has"""
        self.local: dict[int, torch.Tensor] = {}
        """stage 1 keeps this rank's own gradients, where the stand-ins are now"""
        self.reduced = False
        """stage 1: they are averaged, before the step"""

    @property
    def apart(self) -> bool:
        """They are the ranks' own: stage 1 averages them in a step."""
        return self.parts.stage == 1 and not self.reduced

    def clear(self) -> None:
        self.some = self.reduced = False
        self.arrived.clear()
        self.local.clear()

    def pieces(self) -> Iterator[tuple[torch.Tensor, SharePart]]:
        kind = OwnGradient if self.apart else SharePart
        for p in self._arrived() if self.some else ():
            share, (shape, dtype) = self.layout.shares[id(p)], self.parts.shapes[id(p)]
            read, write = partial(self._read, p), partial(self._write, p)
            yield p, kind(shape, dtype, (share.start, share.stop), read, write, object())

    def _read(self, p: torch.Tensor) -> torch.Tensor:
        part = self.layout.gradient(p)
        assert part is not None
        return part.float() / float(self.zero.loss_scale)

    def _write(self, p: torch.Tensor, full: torch.Tensor) -> None:
        if (part := self.layout.gradient(p)) is not None:
            share = self.layout.shares[id(p)]
            part.copy_(full[share.start : share.stop] * float(self.zero.loss_scale))
            self.layout.wrote_gradients([p])

    @torch.no_grad()
    def empty(self, p: torch.Tensor) -> None:
        """Zeros, for a step that leaves it out or takes them."""
        self.local.pop(id(p), None)
        if id(p) not in self.arrived:
            return
        self.arrived.discard(id(p))
        if not self.apart:
            self._write(p, torch.zeros(p.numel()))
        elif hasattr(p, "grad_accum"):
            p.grad_accum = None

    @torch.no_grad()
    def full(self) -> dict[int, torch.Tensor]:
        """By id of the parameter what another engine takes up: complete gradients, or, where the ranks have not
        averaged them, this rank's own. Collective."""
        if self.some and self.apart:
            scale = float(self.zero.loss_scale)
            return {number: own.float() / scale for number, own in self._own().items()}
        return {id(p): full_tensor(piece, p.device) for p, piece in self.pieces()}

    def _own(self) -> dict[int, torch.Tensor]:
        """Stage 1: this rank's own, before the ranks average them."""
        attributes, own_gradients = self.parts.attachments.of, {}
        for p in self.trained:
            own = self.local.get(id(p)) if p.grad is None or isinstance(p.grad, HeldGradient) else p.grad
            own = attributes(p).get("grad_accum") if own is None else own
            if own is not None:
                own_gradients[id(p)] = own
        return own_gradients

    def _arrived(self) -> Iterator[torch.Tensor]:
        return (p for p in self.trained if id(p) in self.arrived)

    def average(self) -> None:
        """Stage 1: as the step would, which is the next then. Collective."""
        if self.apart:
            ds.gather_all(self.engine)
            self.reduced = True

    def clip(self, chosen: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Those of these parameters. Collective."""
        number = len(self.trained)
        if self.parts.stage == 3 and norm_type == 2 and number == len(chosen) == len(set(map(id, chosen))):
            parts = [self.zero.grad_partitions_flat_buffer]  # in one
        else:
            chosen = [p for p in chosen if id(p) in self.arrived]
            shares = map(self.layout.gradient, chosen)
            parts = [p.new_zeros(0) if part is None else part for p, part in zip(chosen, shares, strict=True)]
        norm = norm_over_ranks(parts, norm_type, self.parts.device, parts=True)
        norm = norm / float(self.zero.loss_scale) if norm_type else norm
        clip_to(parts, norm, max_norm)
        self.layout.wrote_gradients(chosen)
        return norm

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        if self.apart:
            for own in self._own().values():
                own.mul_(factor)
        else:
            for p in self._arrived():
                if (part := self.layout.gradient(p)) is not None:
                    part.mul_(factor)
            self.layout.wrote_gradients(self._arrived())


class OwnGradient(SharePart):
    """Stage 1, where the ranks have not averaged it."""

    everywhere = True

    def ranges(self) -> Sequence[tuple[int, int]]:
        return ()
