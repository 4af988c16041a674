"""Divides an optimizer's state: that of a parameter is on the rank that steps it, its owner, and nowhere else.

The others have stand-ins for its tensors, and keep step counts themselves. While a cell runs, who touches one of them
between two steps has it whole (owned_tensors.py). What a cell takes out of the state, or puts into it, is seen before
the next step: all ranks do the same, so each can tell by itself. What an owner's optimizer has made it tells the others
after the first step with a gradient, and whenever it may be other than it was: for torch's own optimizers that is known
on every rank alike, of others the owners say so after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.owned_tensors import (
    FetchedTensor,
    OwnedTensor,
    Ownership,
    bring,
    hand_out,
    put_away,
    stand_in,
    take_back,
)

Described = tuple[tuple[Any, ...], ...]
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Ledger:
    """What this rank knows about one optimizer's state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.plain = type(optimizer).__module__.startswith("torch.optim")
        """it is torch's own: its state depends on options and on which parameters have had gradients"""
        self.seen: set[int] = set()
        """ids of parameters whose state the owner has described"""
        self.told: dict[int, Described] = {}
        """the descriptions that this rank has sent, with the step counts that the others expect by now"""
        self.options: Any = None
        self.held: list[Any] = []
        """all that was in the state after the last step"""
        self.owned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a divided tensor → (it, its parameter)"""

    def look(self, optimizer: Optimizer) -> bool:
        """Whether options have changed since the last time, so that it may keep something else."""
        before, self.options = self.options, _switches(optimizer) if self.plain else _options(optimizer)
        return before is not None and before != self.options


class DividedState:
    """Divides the state of a component's optimizers. `owner(p)`: the rank that steps it; None: every rank does."""

    def __init__(self, strategy: str, owner: Callable[[torch.Tensor], int | None]) -> None:
        self.strategy = strategy
        self.owner = owner
        self.rank = dist.get_rank()  # a cell may destroy the group
        self.ledgers: WeakKeyDictionary[Optimizer, Ledger] = WeakKeyDictionary()
        self.whole: dict[int, tuple[torch.Tensor, Ownership]] = {}
        """tensors that the cell has edited since the last step, or may have"""
        self.in_cell = False

    # -- before a cell -------------------------------------------------------------------

    def enter(self, optimizers: Iterable[Optimizer]) -> None:
        """A cell is about to run. Collective."""
        self.in_cell = True
        for optimizer in optimizers:
            self.renew(optimizer)

    def leave(self) -> None:
        """A cell has ended: the state looks as the notebook knows it."""
        self.in_cell = False
        self.put_away()
        for ledger in self.ledgers.values():
            for tensor, _ in ledger.owned.values():
                take_back(tensor)

    def put_away(self) -> None:
        """Leave what was whole for a while to its owner."""
        while self.whole:
            _, (tensor, ownership) = self.whole.popitem()
            put_away(tensor, ownership, self.rank)

    @torch.no_grad()
    def renew(self, optimizer: Optimizer) -> None:
        """Divide what is in the state now. What is in it no more becomes whole, for who holds it still. Collective."""
        for tensor, p in self._left(optimizer):
            take_back(tensor)
            bring(tensor, self._ownership(p))
        self.cut(optimizer)

    def edited(self, optimizer: Optimizer) -> bool:
        """Whether something was put into the state, or taken out of it, since the last step."""
        ledger = self._ledger(optimizer)
        held = _values(optimizer)
        return len(held) != len(ledger.held) or not all(map(is_, held, ledger.held))

    def written(self, optimizer: Optimizer) -> list[torch.Tensor | None]:
        """What every rank has whole, since the cell has brought it, or put it there; None in the place of others."""
        values = (value for _, _, value in self._entries(optimizer))
        return [value if type(value) is torch.Tensor and value.ndim else None for value in values]

    def _left(self, optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, parameter) of what was divided and is in the state no more."""
        ledger = self.ledgers.get(optimizer)
        if ledger is None:
            return []
        now = set(map(id, _values(optimizer)))
        return [pair for key, pair in ledger.owned.items() if key not in now]

    def _ownership(self, p: torch.Tensor) -> Ownership:
        owner = self.owner(p)
        assert owner is not None
        return Ownership(self.strategy, owner, p.device, self.whole)

    @torch.no_grad()
    def cut(self, optimizer: Optimizer) -> None:
        """Let go of the state of other ranks' parameters. Not collective."""
        before = self.ledgers.get(optimizer)
        same = before is not None and not self.edited(optimizer)
        ledger = self.ledgers[optimizer] = Ledger(optimizer)
        if before is not None and same:  # what somebody else has put there, a step may add to
            ledger.seen = before.seen
        for p, key, value in self._entries(optimizer):
            if _what(p, key, value)[0] == "nested":
                raise self._nested(optimizer, key, value)
            if self._divided(key, value):
                take_back(value)
                self.whole.pop(id(value), None)
                if self.owner(p) != self.rank and value.untyped_storage().nbytes() > value.element_size():
                    value.data = stand_in(value)
        for p in held_by(optimizer):
            if self.owner(p) == self.rank and optimizer.state.get(p):
                ledger.told[id(p)] = _described(p, optimizer.state[p])
        self._note(optimizer, ledger)

    def _note(self, optimizer: Optimizer, ledger: Ledger) -> None:
        """Remember what is in the state now."""
        ledger.held = _values(optimizer)
        ledger.owned = self._divided_in(optimizer)
        if self.in_cell:
            for tensor, p in ledger.owned.values():
                hand_out(tensor, self._ownership(p))

    # -- a step --------------------------------------------------------------------------

    def stepping(self, optimizer: Optimizer) -> bool:
        """Before a step: whether its options have changed, so that it may keep something else."""
        return self._ledger(optimizer).look(optimizer)

    @torch.no_grad()
    def stepped(self, optimizer: Optimizer, changed: bool) -> None:
        """After a step. Collective, with gradients of the same parameters on every rank."""
        ledger = self._ledger(optimizer)
        held = [p for p in held_by(optimizer) if p.grad is not None and self.owner(p) is not None]
        new = [p for p in held if id(p) not in ledger.seen]
        self._count(optimizer, ledger, held)
        if ledger.plain:
            if not (new or changed):
                ledger.held = _values(optimizer)
                return
            mine = [p for p in (held if changed else new) if self.owner(p) == self.rank]
            ledger.seen.update(map(id, new))
            self._tell(optimizer, {id(p): _described(p, optimizer.state[p]) for p in mine if p in optimizer.state})
            self._note(optimizer, ledger)
            return
        mine = [p for p in held_by(optimizer) if self.owner(p) == self.rank]
        found = {id(p): _described(p, optimizer.state[p]) for p in mine if p in optimizer.state}
        news = {key: what for key, what in found.items() if ledger.told.get(key) != what}
        ledger.told = found
        other = ledger.look(optimizer)
        flag = torch.tensor(
            float(bool(news) or other), device=held[0].device if held else mine[0].device if mine else None
        )
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            self._tell(optimizer, news, ledger.options)
        self._note(optimizer, ledger)

    def _count(self, optimizer: Optimizer, ledger: Ledger, held: list[torch.Tensor]) -> None:
        """Count the step for other ranks' parameters."""
        # a GradScaler's: a fused kernel has left the step out by itself
        skipped = getattr(optimizer, "found_inf", None)
        by: Any = 1 if skipped is None else 1 - skipped.reshape(())
        for p in held:
            state = optimizer.state.get(p)
            if not state or "step" not in state:
                continue
            if self.owner(p) != self.rank:
                count = state["step"]
                if isinstance(count, torch.Tensor):
                    count += by.to(count.device) if isinstance(by, torch.Tensor) else by
                else:
                    state["step"] = count + (int(by) if isinstance(count, int) else float(by))
            elif not ledger.plain and (before := ledger.told.get(id(p))):
                ledger.told[id(p)] = tuple(
                    (key, kind, value + 1, *more) if key == "step" and kind != "tensor" else (key, kind, value, *more)
                    for key, kind, value, *more in before
                )

    def _tell(self, optimizer: Optimizer, mine: dict[int, Described], options: Any = None) -> None:
        """Tell the others what this rank's state is now, and take in theirs. Collective."""
        held = held_by(optimizer)
        odd = next((key for what in mine.values() for key, kind, *_ in what if kind == "nested"), None)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, ({i: mine[id(p)] for i, p in enumerate(held) if id(p) in mine}, options, odd))
        odd = next((odd for *_, odd in told if odd is not None), None)
        if odd is not None:
            raise self._nested(optimizer, odd, None)
        if any(others != told[0][1] for _, others, _ in told):
            raise NotSupported(
                f"{type(optimizer).__name__} under {self.strategy}: its step changes options of its groups by what it "
                "finds in all parameters together, and here a rank steps some of them only. Under --strategy ddp it "
                "works"
            )
        for rank, (theirs, *_) in enumerate(told):
            for i, what in theirs.items() if rank != self.rank else ():
                self._take(optimizer, held[i], what)
        state = dict(optimizer.state)
        order = {id(p): i for i, p in enumerate(held)}
        optimizer.state.clear()  # in the order in which one process makes it
        optimizer.state.update(sorted(state.items(), key=lambda item: order.get(id(item[0]), len(order))))

    def _take(self, optimizer: Optimizer, p: torch.Tensor, what: Described) -> None:
        before = dict(optimizer.state.get(p) or {})
        state = optimizer.state[p]
        state.clear()
        for key, kind, value, *more in what:
            there = before.get(key)
            if kind == "plain":
                state[key] = value
                continue
            dtype, beside = more
            device = p.device if beside else torch.device("cpu")
            if kind == "count":
                if not isinstance(there, torch.Tensor):
                    there = torch.zeros((), dtype=dtype, device=device)
                there.fill_(value)
            elif not isinstance(there, torch.Tensor) or (there.shape, there.dtype) != (value, dtype):
                there = stand_in(torch.empty((), dtype=dtype, device=device).expand(value))
            state[key] = there

    # -- between cells -------------------------------------------------------------------

    def pieces(self, optimizers: Iterable[Optimizer]) -> Iterator[tuple[torch.Tensor, OwnedTensor]]:
        for optimizer in optimizers:
            for value, p in (*self._divided_in(optimizer).values(), *self._left(optimizer)):
                mine = self.owner(p) == self.rank
                # mypy infers no lambda with a default
                yield value, OwnedTensor(lambda value=value: value, mine, mine, self)  # type: ignore[misc]

    @torch.no_grad()
    def make_whole(self, optimizers: Iterable[Optimizer]) -> None:
        """Make the state whole on every rank, in place. Collective."""
        for optimizer in optimizers:
            for value, p in (*self._divided_in(optimizer).values(), *self._left(optimizer)):
                bring(value, self._ownership(p))
                if value.shape == p.shape and value.stride() != p.stride():
                    value.data = torch.empty_like(p, dtype=value.dtype).copy_(value)

    # -- parts ---------------------------------------------------------------------------

    def _ledger(self, optimizer: Optimizer) -> Ledger:
        if optimizer not in self.ledgers:
            self.cut(optimizer)
        return self.ledgers[optimizer]

    def _entries(self, optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, str, Any]]:
        """(parameter, key, value) of parameters that have an owner, in the same order on all ranks."""
        for p in held_by(optimizer):
            state = optimizer.state.get(p)
            if state and self.owner(p) is not None:
                for key in sorted(state, key=str):
                    yield p, key, state[key]

    def _divided_in(self, optimizer: Optimizer) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """id of each divided tensor → (it, its parameter)"""
        return {id(v): (v, p) for p, key, v in self._entries(optimizer) if self._divided(key, v)}

    def _divided(self, key: str, value: Any) -> TypeGuard[torch.Tensor]:
        if not isinstance(value, torch.Tensor) or (key == "step" and value.dim() == 0):
            return False
        return type(value) in (torch.Tensor, FetchedTensor)

    def _nested(self, optimizer: Optimizer, key: str, value: Any) -> NotSupported:
        what = "" if value is None else f" is a {type(value).__name__}, and"
        return NotSupported(
            f"{type(optimizer).__name__} under {self.strategy}: its state {key!r}{what} cannot be divided "
            "among ranks (only tensors and numbers for each parameter can). Under --strategy ddp it works"
        )


def _described(p: torch.Tensor, state: dict[str, Any]) -> Described:
    return tuple((key, *_what(p, key, value)) for key, value in state.items())


def _what(p: torch.Tensor, key: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, PLAIN):
        return "plain", value
    if not isinstance(value, torch.Tensor):
        return "nested", type(value).__name__
    beside = value.device == p.device
    if key == "step" and value.dim() == 0:
        return "count", float(value), value.dtype, beside
    return "tensor", value.shape, value.dtype, beside


def _values(optimizer: Optimizer) -> list[Any]:
    """All values in its state."""
    entries = optimizer.state.values()
    return [value for entry in entries for value in (entry.values() if isinstance(entry, dict) else (entry,))]


def _switches(optimizer: Optimizer) -> Any:
    """Options as booleans: whether there is a momentum decides what is kept."""
    return [
        [bool(value) for key, value in group.items() if key != "lr" and isinstance(value, (bool, int, float))]
        for group in optimizer.param_groups
    ]


def _options(optimizer: Optimizer) -> Any:
    return [
        [(key, value) for key, value in group.items() if isinstance(value, PLAIN)] for group in optimizer.param_groups
    ]
