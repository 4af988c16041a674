"""Steps of optimizers for which torch has no rules by pieces: while one steps, its groups hold ordinary tensors.

Where a rehearsal says that it treats each row by itself these are the rank's own rows, in their memory, and nothing is
sent. Otherwise they are whole: every rank gathers weights, gradients and state, steps all of it, and keeps its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop

from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.optimizers import call_first_after_step, call_last_before_step
from nbtrain.errors import NotSupported
from nbtrain.strategies.base import STANDS_IN
from nbtrain.strategies.kit.call_arguments import with_closure
from nbtrain.strategies.kit.dtensor_operations import counts, put_together, take
from nbtrain.strategies.kit.lone_steps import steps_each_alone
from nbtrain.strategies.kit.random_draws import shared_random_state
from nbtrain.strategies.kit.rehearsed_steps import Rows, Way, all_of, exchange, steps_alike
from nbtrain.strategies.kit.row_shards import cut, from_local

WITHOUT_RULES = (Rprop, Adafactor)
"""torch's own that write by index, or keep rows and columns"""


class PlainSteps:
    """Puts ordinary tensors into the groups of some optimizers while they step."""

    def __init__(self) -> None:
        self._whole: WeakKeyDictionary[Optimizer, bool | None] = WeakKeyDictionary()
        """which optimizers have been looked at. True: it is given whole tensors; None: it steps what is in pieces"""
        self._hooks: WeakKeyDictionary[Optimizer, tuple[Any, Any]] = WeakKeyDictionary()
        self._now: _Step | None = None

    def choose(self, optimizer: Optimizer) -> list[str]:
        """Called before a step, when the optimizer is complete: its constructor may make more than torch's. Finds out
        how it is to be stepped; a sentence about one that is nobody's or is stepped whole."""
        if optimizer in self._whole:
            return []
        self._whole[optimizer] = None
        if steps_each_alone(optimizer) and not isinstance(optimizer, WITHOUT_RULES):
            return []
        name = type(optimizer).__name__
        vector = type(optimizer) is LBFGS  # which remembers how many numbers its parameters have
        if not vector and steps_alike(optimizer, Rows(), closure=True):
            self._whole[optimizer] = False
            note = (
                f"{name} is not torch's own: tried on small tensors, it treats each row by itself, so each rank steps "
                "its rows"
            )
        elif vector or steps_alike(optimizer, Way(), closure=True):
            self._whole[optimizer] = True
            note = (
                f"{name} looks at whole tensors, or at all of them: every rank gathers weights, gradients and state to "
                "step them, which takes as much memory as ddp for as long"
            )
        else:
            del self._whole[optimizer]
            raise NotSupported(
                f"{name} cannot step what fsdp has in pieces: tried on small tensors, it fails, or does something else "
                "when other tensors are in its groups while it steps. Write --strategy ddp"
            )
        self.enter([optimizer])
        return [] if isinstance(optimizer, Rprop) else [note]

    def enter(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            if self._whole.get(optimizer) is not None and optimizer not in self._hooks:
                before = optimizer.register_step_pre_hook(self._begin)
                self._hooks[optimizer] = before, optimizer.register_step_post_hook(self._end)

    def leave(self) -> None:
        self.restore()
        for handle in (handle for pair in self._hooks.values() for handle in pair):
            handle.remove()
        self._hooks.clear()

    def arrange(self, optimizer: Optimizer) -> None:
        """Called before each step: hooks of the user's see what is in pieces."""
        if hooks := self._hooks.get(optimizer):
            call_last_before_step(optimizer, hooks[0])
            call_first_after_step(optimizer, hooks[1])

    def restore(self) -> None:
        """Called before a backward and a clipping, too: a step may have raised, and the loop gone on."""
        now = self._now
        if now is not None and now.on:  # else it is a backward in its closure
            self._now = None
            now.end()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._now is not None and any(optimizer is one for one in self._now.every):
            return None  # it is stepped by the one around it
        self.restore()
        self._now = now = _Step(optimizer, bool(self._whole[optimizer]))
        return with_closure(args, kwargs, now.in_pieces)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._now is not None and self._now.every[0] is optimizer:
            self.restore()


class _Step:
    """One step of one optimizer."""

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer, whole: bool) -> None:
        self.optimizer, self.whole = optimizer, whole
        self.every = all_of(optimizer)
        self.plain: dict[DTensor, nn.Parameter] = {}
        for p in (p for one in self.every for group in one.param_groups for p in group["params"]):
            if isinstance(p, DTensor) and p not in self.plain:
                self.plain[p] = nn.Parameter(self._content(p), p.requires_grad)
                vars(self.plain[p]).update(vars(p), **{STANDS_IN: True})
        self.shown: dict[int, tuple[torch.Tensor, DTensor]] = {}
        """by id of an ordinary tensor of the state: it, and what it is of"""
        for state in self._states():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    state[key] = content = self._content(value)
                    self.shown[id(content)] = content, value
        self.on = self.stood = False
        self.drawing = ExitStack()
        self.put_on()

    def _content(self, tensor: DTensor) -> torch.Tensor:
        return put_together(tensor) if self.whole else local_part(tensor).detach()

    def _states(self) -> list[dict[str, Any]]:
        return [state for one in self.every for state in one.state.values() if isinstance(state, dict)]

    @torch.no_grad()
    def put_on(self) -> None:
        for p, plain in self.plain.items():
            if self.whole and self.stood:  # a closure has run since
                plain.copy_(put_together(p))
            plain.grad = None if p.grad is None else self._content(p.grad)  # type: ignore[arg-type]  # in pieces, as its weight
        exchange(self.optimizer, {id(p): plain for p, plain in self.plain.items()})
        if self.whole and self.plain:  # noise is drawn as one process draws it
            self.drawing.enter_context(shared_random_state(next(iter(self.plain.values())).device))
        self.on = self.stood = True

    @torch.no_grad()
    def take_off(self) -> None:
        exchange(self.optimizer, {id(plain): p for p, plain in self.plain.items()})
        self.drawing.close()
        self.on = False
        counts[0] += 1
        for p, plain in self.plain.items():
            self._write(p, plain.detach())
            if plain.grad is None or p.grad is None:
                p.grad = None if plain.grad is None else self._cut(p, plain.grad)
            else:
                self._write(p.grad, plain.grad)  # type: ignore[arg-type]  # in pieces

    def _write(self, tensor: DTensor, content: torch.Tensor) -> None:
        if self.whole:
            take(tensor, content)
        elif content.data_ptr() != local_part(tensor).data_ptr():
            local_part(tensor).copy_(content)

    def _cut(self, p: DTensor, content: torch.Tensor) -> DTensor:
        return cut(p, content) if self.whole else from_local(p, content, p.shape)

    def in_pieces(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure runs forwards and backwards, for which weights are in pieces."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.take_off()
            try:
                return closure(*args, **kwargs)
            finally:
                self.put_on()

        return run

    @torch.no_grad()
    def end(self) -> None:
        self.take_off()
        states: list[tuple[Any, Any]] = [item for one in self.every for item in one.state.items()]
        for p, state in states:
            for key, value in state.items() if isinstance(state, dict) else ():
                if id(value) in self.shown:
                    state[key] = self.shown[id(value)][1]
                    self._write(state[key], value)
                elif p in self.plain and isinstance(value, torch.Tensor) and self._is_piece(value, p):
                    state[key] = self._cut(p, value)

    def _is_piece(self, value: torch.Tensor, p: DTensor) -> bool:
        shape = p.shape if self.whole else local_part(p).shape
        return not isinstance(value, DTensor) and value.dim() > 0 and value.shape == shape
