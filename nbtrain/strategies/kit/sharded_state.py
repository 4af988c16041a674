"""An optimizer's state in pieces: that of a parameter is on the rank that steps it, its owner, and nowhere else.

The others have a number in the shape of its tensors, and keep step counts themselves. While a cell runs, all of them
are `StateStandIn`s, on their owners, too: between two steps they can be copied, as a state dict is when it is kept or
saved, and nothing else; `with whole(optimizer):` shows them complete. During a step the class means nothing, so the
optimizer's kernels find ordinary tensors.

What a cell takes out of the state, or puts into it, is seen before the next step: all ranks do the same, so each can
tell by itself. What an owner's optimizer has made it tells the others after the first step with a gradient, and when
options have changed. Only torch's own steps are divided (per_parameter_optimizers.py), and what they keep depends on
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.kit.component_tensors import entries, parameters_of
from nbtrain.strategies.kit.owned_tensors import OwnedTensor, StandIn, stand_in
from nbtrain.strategies.kit.written_numbers import wrote_whole

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
OF = "nbtrain_owned"
"""the attribute of a `StateStandIn` that says (its owner, the device on which it is sent)"""
READ = (
    "a tensor of the optimizer's state was read or edited between two steps, and one rank has it: write `with "
    "whole(optimizer):` around these lines, on every rank; a state dict can be copied, "
    "saved and loaded without it"
)
TOGETHER = "copy the values on every rank (`state = copy.deepcopy(optimizer.state_dict())`), above `if rank == 0:`"
ITSELF = frozenset({"detach", "data"})
MOVES = frozenset({"to", "cpu", "cuda", "contiguous"})
"""They return the very tensor where there is nothing to do."""
COPIES = MOVES | {"clone", "__deepcopy__", "__reduce_ex__"}


class StateStandIn(StandIn):
    """A tensor of an optimizer's state in a cell, between two steps. A copy of it is an ordinary, whole tensor."""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensor = args[0] if args else None
        if type(tensor) is not cls:
            raise NotSupported(READ)
        if name in ("__repr__", "__format__"):
            return f"<a tensor of an optimizer's state that one rank has, {tuple(tensor.shape)}>"
        if name in ITSELF:
            return tensor
        if name not in COPIES:
            raise NotSupported(READ)
        if name in MOVES:
            with tensors.as_plain_tensors():
                if func(*args, **kwargs) is tensor:
                    return tensor
        full = brought(tensor, *vars(tensor)[OF])
        return full.clone() if name in ("clone", "__deepcopy__") else func(full, *args[1:], **kwargs)


@torch.no_grad()
def brought(tensor: torch.Tensor, owner: int, device: torch.device) -> torch.Tensor:
    """The whole tensor: the owner's own memory there, a copy of it on the others. Collective."""
    with tensors.as_plain_tensors():
        plain = tensor.as_subclass(torch.Tensor)
        mine = owner == dist.get_rank()
        full = plain if mine else torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        sent = full.contiguous().view(-1).to(device)
    if sent.numel():
        try:
            dist.broadcast(sent.view(torch.uint8), owner)  # not every backend knows every type
        except NotSupported as error:
            raise NotSupported(
                f"{error}. An optimizer's state is divided among the ranks here, and whoever copies it needs every "
                f"rank: {TOGETHER}, or take --strategy ddp"
            ) from None
    return full if mine else full.copy_(sent.view(full.shape))


def take_back(tensor: torch.Tensor) -> None:
    """Make an ordinary tensor of it again. Its content on this rank stays."""
    if tensor.__class__ is StateStandIn:
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]  # it becomes another class
        vars(tensor).pop(OF, None)


class Form(NamedTuple):
    """What others have to know of a tensor of an owner's state."""

    shape: torch.Size
    dtype: torch.dtype
    beside: bool
    """it is where the parameter is"""
    steps: float | None
    """it is a step count, which every rank keeps"""


class Ledger:
    """What this rank knows about one optimizer's state."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        """ids of parameters whose state the owner has described"""
        self.options: Any = None
        self.held: list[Any] = []
        """all that was in the state after the last step"""
        self.owned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a divided tensor → (it, its parameter)"""


class ShardedState:
    """Divides the state of a component's optimizers. `owner(p)`: the rank that steps it; None: every rank does."""

    def __init__(self, strategy: str, owner: Callable[[torch.Tensor], int | None]) -> None:
        self.strategy = strategy
        self.owner = owner
        self.rank = dist.get_rank()  # a cell may destroy the group
        self.ledgers: WeakKeyDictionary[Optimizer, Ledger] = WeakKeyDictionary()
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
        for ledger in self.ledgers.values():
            for tensor, _ in ledger.owned.values():
                take_back(tensor)

    def renew(self, optimizer: Optimizer) -> None:
        """Divide what is in the state now. What is in it no more becomes whole, for who holds it still. Collective."""
        for tensor, p in self._left(optimizer):
            self._put_together(tensor, p)
        self.cut(optimizer)

    def loaded(self, optimizer: Optimizer) -> None:
        """A state dict was loaded, which every rank has whole. Collective."""
        wrote_whole(value for _, _, value in self._entries(optimizer))
        self.renew(optimizer)

    def edited(self, optimizer: Optimizer) -> bool:
        """Whether something was put into the state, or taken out of it, since the last step."""
        ledger = self._ledger(optimizer)
        values = _values(optimizer)
        return len(values) != len(ledger.held) or not all(map(is_, values, ledger.held))

    def written(self, optimizer: Optimizer) -> list[torch.Tensor | None]:
        """What every rank has whole, since the cell has put it there; None in the place of others."""
        values = (value for _, _, value in self._entries(optimizer))
        return [value if type(value) is torch.Tensor and value.ndim else None for value in values]

    def _left(self, optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, parameter) of what was divided and is in the state no more, or that of another rank's parameter."""
        ledger = self.ledgers.get(optimizer)
        if ledger is None:
            return []
        now = self._divided_in(optimizer)
        stays = {key for key, (_, p) in ledger.owned.items() if key in now and self.owner(p) == self.owner(now[key][1])}
        return [pair for key, pair in ledger.owned.items() if key not in stays]

    @torch.no_grad()
    def cut(self, optimizer: Optimizer) -> None:
        """Let go of the state of other ranks' parameters. Not collective."""
        before = self.ledgers.get(optimizer)
        same = before is not None and not self.edited(optimizer)
        ledger = self.ledgers[optimizer] = Ledger()
        if before is not None and same:  # what somebody else has put there, a step may add to
            ledger.seen = before.seen
        for p, key, value in self._entries(optimizer):
            if self._divided(key, value):
                take_back(value)
                if self.owner(p) != self.rank and value.untyped_storage().nbytes() > value.element_size():
                    value.data = stand_in(value)
            elif not isinstance(value, (torch.Tensor, *PLAIN)):
                raise NotSupported(
                    f"{type(optimizer).__name__} under {self.strategy}: its state {key!r} is a {type(value).__name__}, "
                    "and cannot be divided among ranks (only tensors and numbers for each parameter can). Under "
                    "--strategy ddp it works"
                )
        self._note(optimizer, ledger)

    def _note(self, optimizer: Optimizer, ledger: Ledger) -> None:
        """Remember what is in the state now."""
        ledger.held = _values(optimizer)
        ledger.owned = self._divided_in(optimizer)
        for tensor, p in ledger.owned.values() if self.in_cell else ():
            if tensor.__class__ is torch.Tensor:
                tensor.__class__ = StateStandIn
                vars(tensor)[OF] = self.owner(p), p.device

    # -- a step --------------------------------------------------------------------------

    def stepping(self, optimizer: Optimizer) -> bool:
        """Before a step: whether its options have changed, so that it may keep something else."""
        ledger = self._ledger(optimizer)
        before, ledger.options = ledger.options, _switches(optimizer)
        return before is not None and before != ledger.options

    @torch.no_grad()
    def stepped(self, optimizer: Optimizer, changed: bool) -> None:
        """After a step. Collective, with gradients of the same parameters on every rank."""
        ledger = self._ledger(optimizer)
        stepped = [p for p in parameters_of(optimizer) if p.grad is not None and self.owner(p) is not None]
        new = [p for p in stepped if id(p) not in ledger.seen]
        self._count(optimizer, stepped)
        if new or changed:
            ledger.seen.update(map(id, new))
            self._tell(optimizer, {id(p) for p in (stepped if changed else new)})
            self._note(optimizer, ledger)
        else:
            ledger.held = _values(optimizer)

    def _count(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Count the step for other ranks' parameters."""
        # a GradScaler's: a fused kernel has left the step out by itself
        skipped = getattr(optimizer, "found_inf", None)
        by: Any = 1 if skipped is None else 1 - skipped.reshape(())
        for p in parameters:
            state = optimizer.state.get(p)
            if self.owner(p) == self.rank or not state or "step" not in state:
                continue
            count = state["step"]
            if isinstance(count, torch.Tensor):
                count += by.to(count.device) if isinstance(by, torch.Tensor) else by
            else:
                state["step"] = count + (int(by) if isinstance(count, int) else float(by))

    def _tell(self, optimizer: Optimizer, chosen: set[int]) -> None:
        """Tell the others what the state of these parameters is now, and take in theirs. Collective."""
        parameters = parameters_of(optimizer)
        mine = {
            i: {key: _described(p, key, value) for key, value in optimizer.state[p].items()}
            for i, p in enumerate(parameters)
            if id(p) in chosen and self.owner(p) == self.rank and p in optimizer.state
        }
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        for rank, theirs in enumerate(told):
            for i, what in theirs.items() if rank != self.rank else ():
                self._take(optimizer, parameters[i], what)
        state = dict(optimizer.state)
        order = {id(p): i for i, p in enumerate(parameters)}
        optimizer.state.clear()  # in the order in which one process makes it
        optimizer.state.update(sorted(state.items(), key=lambda item: order.get(id(item[0]), len(order))))

    def _take(self, optimizer: Optimizer, p: torch.Tensor, told: dict[str, Any]) -> None:
        before = dict(optimizer.state.get(p) or {})
        state = optimizer.state[p]
        state.clear()
        for key, what in told.items():
            there = before.get(key)
            if isinstance(what, Form):
                if not isinstance(there, torch.Tensor) or (there.shape, there.dtype) != (what.shape, what.dtype):
                    device = p.device if what.beside else torch.device("cpu")
                    there = torch.zeros((), dtype=what.dtype, device=device).expand(what.shape)
                    there = stand_in(there) if what.steps is None else there
                what = there if what.steps is None else there.fill_(what.steps)
            state[key] = what

    # -- between cells -------------------------------------------------------------------

    def pieces(self, optimizers: Iterable[Optimizer]) -> Iterator[tuple[torch.Tensor, OwnedTensor]]:
        for value, p in self._all(optimizers):
            mine = self.owner(p) == self.rank
            yield value, OwnedTensor(value, mine, mine, self)

    @torch.no_grad()
    def make_whole(self, optimizers: Iterable[Optimizer], of: Iterable[torch.Tensor] | None = None) -> None:
        """Make the state whole on every rank, in place; `of`: that of these parameters. Collective."""
        chosen = None if of is None else set(map(id, of))
        for value, p in self._all(optimizers):
            if chosen is not None and id(p) not in chosen:
                continue
            self._put_together(value, p)
            if value.shape == p.shape and value.stride() != p.stride():
                value.data = torch.empty_like(p, dtype=value.dtype).copy_(value)

    # -- parts ---------------------------------------------------------------------------

    def _ledger(self, optimizer: Optimizer) -> Ledger:
        if optimizer not in self.ledgers:
            self.cut(optimizer)
        return self.ledgers[optimizer]

    def _all(self, optimizers: Iterable[Optimizer]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, parameter) of what is divided: in the state, or in it before a cell took it out."""
        for optimizer in optimizers:
            left = self._left(optimizer)
            gone = {id(value) for value, _ in left}
            yield from (pair for key, pair in self._divided_in(optimizer).items() if key not in gone)
            yield from left

    def _entries(self, optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, str, Any]]:
        """Of parameters that have an owner."""
        return (entry for entry in entries(optimizer) if self.owner(entry[0]) is not None)

    def _divided_in(self, optimizer: Optimizer) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """id of each divided tensor → (it, its parameter)"""
        return {id(v): (v, p) for p, key, v in self._entries(optimizer) if self._divided(key, v)}

    def _divided(self, key: str, value: Any) -> TypeGuard[torch.Tensor]:
        if not isinstance(value, torch.Tensor) or (key == "step" and value.dim() == 0):
            return False
        return type(value) in (torch.Tensor, StateStandIn)

    def _put_together(self, tensor: torch.Tensor, p: torch.Tensor) -> None:
        """Make it whole on every rank, in place. Collective."""
        take_back(tensor)
        owner = self.owner(p)
        assert owner is not None
        full = brought(tensor, owner, p.device)
        if owner != self.rank:
            tensor.data = full


def _described(p: torch.Tensor, key: str, value: Any) -> Any:
    """What the others are told of it: a number itself, the form of a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    count = float(value) if key == "step" and value.dim() == 0 else None
    return Form(value.shape, value.dtype, value.device == p.device, count)


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
