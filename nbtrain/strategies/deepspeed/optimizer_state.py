"""The optimizer's state: cut into the engine's flat pieces, and shown as the notebook knows it.

Between cells `optimizer.state` is keyed by the user's parameters and its tensors have their shapes, with one number
behind them: the content is in the pieces. Step counts are real. What the notebook has put there since is taken in.

In a cell the state cannot be read or edited, but `optimizer.state_dict()` gives the whole, as in one process; every
rank has to call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbtrain.errors import NotSupported
from nbtrain.strategies.deepspeed.engine_layout import EngineLayout, SharePart
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer
from nbtrain.strategies.deepspeed.stand_ins import ClosedState, HeldState

UNEVEN = (
    "the cell has given the optimizer a state in which its parameters have taken different numbers of steps (or have "
    "different numbers of another kind), and DeepSpeed's engine was set up for the one before: load or write it in a "
    "cell that is not distributed, before this one, or take --strategy ddp"
)


class EngineOptimizerState:
    """The state of the user's optimizer and of the engine's, `inner`, which has it in pieces."""

    def __init__(self, user: Optimizer, inner: InnerOptimizer, layout: EngineLayout) -> None:
        self.user, self.inner, self.layout = user, inner, layout
        self.shown: dict[tuple[int, str], torch.Tensor] = {}
        """(id of the parameter, key) → the tensor that stands for a piece"""
        self.closed: list[torch.Tensor] = []
        """what refuses to be read or edited, while a cell runs"""
        self.open: Any = None
        """what `optimizer.state` is between cells"""
        self.shut: ClosedState | None = None
        """what it is in one"""
        self.begun = False
        """in this cell there is some"""
        self.uneven: set[int] = set()
        """pieces whose parameters have taken different numbers of steps, and the like: the engine has to be set up
        anew, in other pieces"""

    # -- taking in -----------------------------------------------------------------------

    @torch.no_grad()
    def take(self) -> None:
        """What is new in the user's state goes into the pieces. Not collective."""
        self.uneven.clear()
        for number, flat in enumerate(self.layout.flats):
            members = self.layout.members(number)
            held = [(p, self.user.state[p]) for p in members if self.user.state.get(p)]
            if len({*kept_once(members, self.user.state).values()}) > 1:
                self.uneven.add(number)
            if not held:
                self.inner.state.pop(flat, None)
                self._forget(members)
                continue
            with self.layout.at_hand(number):
                self._take_piece(number, self.layout.flats[number], held)

    def _take_piece(self, number: int, flat: torch.Tensor, held: list[tuple[torch.Tensor, Any]]) -> None:
        state = self.inner.state[flat]
        numbers = _counts(held)
        for p, own in held:
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape and key not in numbers:
                    if self.shown.get((id(p), key)) is value:
                        continue
                    if not isinstance(state.get(key), torch.Tensor):
                        state[key] = torch.zeros_like(flat.data, dtype=value.dtype)
                    self._cut(p, state[key], value.reshape(-1))
                    self._collapse(p, key, value)
        if number in self.uneven:
            return
        first = held[0][1]
        for key in [key for key in state if key not in first]:
            del state[key]
        for key, value in first.items():
            if key == "step" and isinstance(value, torch.Tensor):
                state[key] = torch.tensor(float(value), dtype=torch.float32, device=self._counts_on(held[0][0], flat))
            elif key not in state or key in numbers or not isinstance(value, torch.Tensor):
                state[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def _counts_on(self, member: torch.Tensor, flat: torch.Tensor) -> torch.device:
        """Where torch has the number of steps of a piece: beside it, if a kernel reads it."""
        group = next(group for group in self.user.param_groups if any(p is member for p in group["params"]))
        options = {**group, **self.inner.overrides}
        by_kernel = self.inner.kernel is None and (options.get("fused") or options.get("capturable"))
        return flat.device if by_kernel else torch.device("cpu")

    def _cut(self, p: torch.Tensor, piece: torch.Tensor, whole: torch.Tensor) -> None:
        share = self.layout.shares[id(p)]
        size = share.stop - share.start
        piece.narrow(0, share.at, size).copy_(whole[share.start : share.stop])

    # -- showing -------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """The user's state as the notebook knows it. Not collective."""
        for number, flat in enumerate(self.layout.flats):
            state = self.inner.state.get(flat)
            members = self.layout.members(number)
            if not state or number in self.uneven:
                continue
            size = self.layout.size(number)
            for p in members:
                own = self.user.state[p]
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.numel() in (size, 0):
                        known = self.shown.get((id(p), key))
                        if known is None or own.get(key) is not known:
                            own[key] = torch.empty(0, dtype=value.dtype, device=p.device)
                        self._collapse(p, key, own[key])
                    else:
                        self._count(own, key, value)

    def _count(self, own: dict[str, Any], key: str, value: Any) -> None:
        there = own.get(key)
        if isinstance(there, torch.Tensor) and not there.dim():
            there.fill_(float(value))
        else:
            own[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    def _collapse(self, p: torch.Tensor, key: str, tensor: torch.Tensor) -> None:
        tensor.data = torch.zeros((), dtype=tensor.dtype, device=p.device).expand(p.shape)
        self.shown[id(p), key] = tensor

    # -- a cell ------------------------------------------------------------------------

    def close_to_cell(self) -> None:
        """What only stands for the state (its zeros, and counts that do not go on) says so to whoever asks it."""
        mine = [p for number in range(len(self.layout.flats)) for p in self.layout.members(number)]
        for value in (value for p in mine for value in (self.user.state.get(p) or {}).values()):
            if type(value) is torch.Tensor:
                value.__class__ = HeldState
                self.closed.append(value)
        self.open = self.user.state
        self.user.state = self.shut = ClosedState(self.open)

    def begin(self) -> None:
        """After a step: the first one makes the state."""
        if not self.begun and self.inner.state:
            self.begun = True
            if not self.closed:
                self.open_again()
                self.begun = True
                self.show()
                self.close_to_cell()

    def follow(self) -> None:
        """Before a step: take in another state that the cell has put there, or that it has thrown all away."""
        if self.user.state is not self.shut or self.shut.emptied:
            self.load()
        if self.uneven:
            raise NotSupported(UNEVEN)

    def load(self) -> None:
        """Take in a state that the cell has loaded."""
        self.open_again()
        self.close_to_cell()
        if self.uneven:
            raise NotSupported(UNEVEN)

    def open_again(self) -> None:
        for value in self.closed:
            value.__class__ = torch.Tensor
        self.closed.clear()
        self.begun = False
        shut, self.shut = self.shut, None
        if shut is None:
            return
        replaced = self.user.state is not shut
        if not replaced:
            self.user.state = self.open
        if shut.emptied and not replaced:
            self.user.state.clear()
        if shut.emptied or replaced:
            self.take()

    # -- pieces --------------------------------------------------------------------------

    def pieces(self, parameters: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, SharePart]]:
        for p in parameters:
            share = self.layout.shares.get(id(p))
            if share is None:
                continue
            for key, value in self.user.state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and self.shown.get((id(p), key)) is value:
                    flat = partial(self._flat, share.flat, key)
                    yield value, self.layout.piece(share, p.shape, value.dtype, flat)

    def _flat(self, number: int, key: str) -> torch.Tensor:
        found: torch.Tensor = self.inner.state[self.layout.flats[number]][key]
        return found

    @torch.no_grad()
    def _parts(self) -> Iterator[tuple[torch.Tensor, str, Any]]:
        """(parameter, key, value) of now, in the same order on all ranks; of what is in pieces the stretch
        and its content."""
        for number in range(len(self.layout.flats)):
            size = self.layout.size(number)
            with self.layout.at_hand(number, write=False):
                state = self.inner.state.get(self.layout.flats[number]) or {}
                for p in self.layout.members(number) if state else ():
                    share = self.layout.shares[id(p)]
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == size:
                            piece = value.narrow(0, share.at, share.stop - share.start)
                            yield p, key, ((share.start, share.stop), piece)
                        else:
                            yield p, key, value

    def hook_state_dicts(self, device: torch.device) -> list[Any]:
        """For a cell: `state_dict()` puts one tensor after the other together, and keeps it in main memory; what is
        loaded goes into the pieces. Returns handles."""

        def fill(_: Any, found: dict[str, Any]) -> dict[str, Any]:
            numbers = {
                id(p): number
                for group, packed in zip(self.user.param_groups, found["param_groups"], strict=True)
                for p, number in zip(group["params"], packed["params"], strict=True)
            }
            entries = {number: {**entry} for number, entry in found["state"].items()}
            for p, key, value in self._parts():
                entry = entries.setdefault(numbers[id(p)], {})
                if isinstance(value, tuple):
                    (start, stop), flat = value
                    whole = torch.zeros(p.numel(), dtype=flat.dtype, device=device)
                    whole[start:stop].copy_(flat)
                    dist.all_reduce(whole)
                    entry[key] = whole.view(p.shape).cpu()
                else:
                    entry[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            return {**found, "state": dict(sorted(entries.items()))}

        return [
            self.user.register_state_dict_post_hook(fill),
            self.user.register_load_state_dict_post_hook(lambda _: self.load()),
        ]

    def _forget(self, members: list[torch.Tensor]) -> None:
        mine = {id(p) for p in members}
        self.shown = {place: tensor for place, tensor in self.shown.items() if place[0] not in mine}


def kept_once(parameters: Iterable[torch.Tensor], state: Mapping[Any, Any]) -> dict[int, Any]:
    """By id of each parameter: what its state has once, and not for each element (the count of steps). A flat piece has
    it once, too, so only parameters that agree in it can lie in one piece."""
    parameters = list(parameters)
    numbers = _counts([(p, state[p]) for p in parameters if state.get(p)])

    def of(p: torch.Tensor, key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value) if key in numbers and value.numel() == 1 else "one for each element"
        return value if isinstance(value, int | float | None) else repr(value)

    return {
        id(p): frozenset((key, of(p, key, value)) for key, value in (state.get(p) or {}).items()) for p in parameters
    }


def _counts(held: list[tuple[torch.Tensor, Any]]) -> set[str]:
    """Keys under which the state has one number for a parameter of any shape. Those of a parameter that is a single
    number itself do not tell."""
    found = {
        key
        for p, own in held
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and not value.dim() and p.dim()
    }
    return found | {"step", "mu_product", "eta", "mu"}
