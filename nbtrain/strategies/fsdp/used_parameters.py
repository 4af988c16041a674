"""Finds which parameters of a tree a backward has used: ranks may differ in that.

A gradient is reduced by all ranks or by none. A rank that did not use a parameter gives zeros for it, as under ddp; and
what no rank has used keeps the gradient it had (None, mostly), exactly as in one process: that takes one small
reduction at the end of a backward, which nobody waits for who has used everything.

Which units a rank runs is another matter: their weights are gathered by all ranks together. Ranks that run others would
train on a mixture of layers without noticing, so the order in which they ran is compared in the same reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat import fsdp2
from nbtrain.strategies.kit.collective_calls import OTHER_LAYERS, OWN_NUMBERS, needs_all_ranks
from nbtrain.strategies.kit.dtensor_operations import counts
from nbtrain.strategies.kit.written_numbers import ROUNDING, WORDS, found_gradients, norms, numbers, size


class UsedParameters:
    """Tracks which parameters of one tree this backward used."""

    def __init__(self, states: list[Any], subjects: list[int], device: str) -> None:
        """`subjects`: of the units' collectives."""
        self.groups = [group for state in states for group in fsdp2.groups(state)]
        self.device = device
        self.order = 0
        """a hash of the units that ran, in their order"""
        self.numbers = {id(state): number for number, state in enumerate(states)}
        self.ran: set[int] = set()
        """states that ran with gradients since the last step"""
        self.used: set[int] = set()
        self.new: dict[int, Any] = {}
        """sharded parameters that had no gradient before this backward"""
        self.had: list[bool] = []
        """which had one"""
        for state, about in zip(states, subjects, strict=True):
            for group in fsdp2.groups(state):
                self._watch(group, id(state), about)
            fsdp2.around_end(state, lambda old: needs_all_ranks(functools.partial(self._end, old), subjects[-1]))

        self.told: torch.Tensor | None = None
        """the reduced marks of the backward before"""

    def unit_ran(self, state: Any) -> None:
        """A forward of the unit has ended."""
        self.order = (self.order * 31 + self.numbers[id(state)] + 1) % WORDS
        if torch.is_grad_enabled():
            self.ran.add(id(state))

    def stepped(self) -> None:
        self.ran.clear()

    def forget(self) -> None:
        self.order = 0
        self.ran.clear()
        self.used.clear()
        self.new.clear()
        self.had.clear()
        self.told = None

    def _watch(self, group: Any, state: int, about: int) -> None:
        def watching(old: Callable[..., Any]) -> Callable[..., Any]:
            def post_backward(*unused: Any) -> None:
                if state in self.ran and fsdp2.reduces(group):
                    self._fill(group)
                old(*unused)

            return needs_all_ranks(post_backward, about)

        fsdp2.around_reduction(group, watching)

    def _fill(self, group: Any) -> None:
        for weight in fsdp2.weights(group):
            full = fsdp2.unsharded(weight)
            if full is None or not full.requires_grad:
                continue
            self.had.append(fsdp2.sharded(weight).grad is not None)
            if not self.had[-1]:
                self.new.setdefault(id(weight), fsdp2.sharded(weight))
            if fsdp2.held_back(weight):
                self.used.add(id(weight))
            else:
                fsdp2.give_zeros(weight)

    def _end(self, old: Any) -> None:
        old()
        counts[1] += 1
        params = [weight for group in self.groups if fsdp2.reduces(group) for weight in fsdp2.weights(group)]
        if not params:
            return
        marks = [float(id(param) in self.used) for param in params]
        found_gradients(self.had, usual=False)
        self.had.clear()
        own = [self.order, (numbers[0] if numbers else 0) % WORDS, size() if norms else 0.0]
        numbers.clear()
        norms.clear()
        told = torch.tensor([*marks, *own, *(-mark for mark in own)], dtype=torch.float32, device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        new = dict(self.new)
        before, self.told = self.told, told
        self.used.clear()
        self.new.clear()
        self.order = 0
        pairs = enumerate(zip(params, marks, strict=True))
        lacking = [i for i, (param, mark) in pairs if not mark and id(param) in new]
        if not lacking and self.device != "cpu":  # to read what was just sent, the rank would wait for its GPU
            told = before if before is not None else told.new_zeros(6, device="cpu")
        answers = told.tolist()
        order, written, logarithms, least_order, least_written, least_logarithms = answers[-6:]
        if written != -least_written or logarithms + least_logarithms > ROUNDING:
            raise NotSupported(OWN_NUMBERS)
        if order != -least_order:
            raise NotSupported(f"the ranks ran different layers, or the same in another order: {OTHER_LAYERS}")
        for i in lacking:
            if not answers[i]:
                new[id(params[i])].grad = None
