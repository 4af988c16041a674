"""The optimizer's state: cut into the engine's flat pieces, and shown as the notebook knows it.

Between cells `optimizer.state` is keyed by the user's parameters and its tensors have their shapes, with one number
behind them: the content is in the pieces. Step counts are real. What the notebook has put there since is taken in.

In a cell the state refuses to be read or edited, but `optimizer.state_dict()` gives the whole, as in one process; every
rank has to call it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.deepspeed.engine_layout import EngineLayout, SharePart
from nbtrain.strategies.deepspeed.inner_optimizer import InnerOptimizer
from nbtrain.strategies.deepspeed.stand_ins import STATE, ClosedState, HeldState, KeptState
from nbtrain.strategies.kit.owned_tensors import full_tensor
from nbtrain.strategies.kit.written_numbers import wrote_whole

TWICE = (
    "the optimizer's state has one tensor at two places, and under deepspeed each parameter's is in pieces by itself: "
    "write .clone() where the second is put, in `with whole(optimizer): …`"
)
OF_ANOTHER = (
    "an optimizer was given the state dict of another one: in one process the two go on with the same tensors, and "
    "under deepspeed each has its own. Write `….load_state_dict(copy.deepcopy(optimizer.state_dict()))`"
)


class Given:
    """What a dict of `state_dict()` has for one parameter. In one process it is the optimizer's own."""

    def __init__(self, p: torch.Tensor, entry: dict[str, Any]) -> None:
        self.p, self.entry, self.was = p, entry, dict(entry)
        self.noted()

    def noted(self) -> None:
        self.versions = [tensors.version(tensor) for tensor in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.was.values() if isinstance(value, torch.Tensor)]

    def edited(self) -> bool:
        """Whether the cell has written to it since."""
        return (
            self.entry.keys() != self.was.keys()
            or any(self.entry[key] is not value for key, value in self.was.items())
            or self.versions != [tensors.version(tensor) for tensor in self.tensors()]
        )


_states: WeakSet[EngineOptimizerState] = WeakSet()


class EngineOptimizerState:
    """The state of the user's optimizer and of the engine's, `inner`, which has it in pieces."""

    def __init__(self, user: Optimizer, inner: InnerOptimizer, layout: EngineLayout) -> None:
        self.user, self.inner, self.layout = user, inner, layout
        self.shown: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        """id of a tensor that stands for a piece → (it, the parameter and the key whose piece it is), wherever it has
        been put since"""
        self.closed: list[torch.Tensor] = []
        """what refuses to be read or edited, while a cell runs"""
        self.open: Any = None
        """what `optimizer.state` is between cells, while one runs"""
        self.given: list[Given] = []
        """what `state_dict()` has returned since the last step"""
        self.made = 0
        """how many states there were when it was closed to the cell"""
        _states.add(self)

    # -- taking in -----------------------------------------------------------------------

    @torch.no_grad()
    def take(self) -> None:
        """What is new in the user's state goes into the pieces, and what stands there no more, or for another piece,
        becomes whole. Collective."""
        self._check_alone()
        for tensor, p, key in self._left():
            tensor.data = full_tensor(self._piece(tensor, p, key), tensor.device)
            del self.shown[id(tensor)]
        self._take()

    def _take(self) -> None:
        for number in range(len(self.layout.flats)):
            members = self.layout.members(number)
            states = [(p, self.user.state[p]) for p in members if self.user.state.get(p)]
            if not states:
                self.inner.forget(number)
                continue
            with self.layout.at_hand(number):
                counts = _counts(states)
                if len(set(kept_once(members, self.user.state, counts))) > 1:
                    self.inner.set_apart(number)
                for p in members:
                    self._take_one(number, p, counts)

    def _left(self) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
        """What has been taken out of the state since, or put elsewhere in it."""
        now = {id(value): (id(p), key) for p, key, value in self._tensors()}
        return [entry for number, entry in self.shown.items() if now.get(number) != (id(entry[1]), entry[2])]

    def _tensors(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        entries = ((p, self.user.state.get(p) or {}) for p in self._members())
        values = ((p, key, value) for p, entry in entries for key, value in entry.items())
        return ((p, key, value) for p, key, value in values if isinstance(value, torch.Tensor))

    def _members(self) -> list[torch.Tensor]:
        return [p for number in range(len(self.layout.flats)) for p in self.layout.members(number)]

    def _check_alone(self) -> None:
        """Raise where two parameters' states have one tensor, which cannot stand for two pieces."""
        values = [value for _, key, value in self._tensors() if key != "step"]
        if len(set(map(id, values))) < len(values):
            raise NotSupported(TWICE)
        theirs = (tensor for other in _states if other is not self for one in other.given for tensor in one.tensors())
        if not set(map(id, values)).isdisjoint(map(id, theirs)):
            raise NotSupported(OF_ANOTHER)

    def _take_one(self, number: int, p: torch.Tensor, counts: set[str]) -> None:
        own, state, flat = self.user.state.get(p) or {}, self.inner.state_of(number, p), self.layout.flats[number]
        for key in [key for key in state if key not in own]:
            del state[key]
        for key, value in own.items():
            if not isinstance(value, torch.Tensor):
                state[key] = value
            elif key == "step":
                state[key] = torch.tensor(float(value), dtype=torch.float32, device=self._counts_on(p, flat))
            elif value.shape != p.shape or key in counts:
                state[key] = value.detach().clone()
            elif not self._stands(value, p, key):
                apart, share = self.inner.is_apart(number), self.layout.shares[id(p)]
                if not isinstance(state.get(key), torch.Tensor):
                    state[key] = torch.zeros(self.inner.size(number, p), dtype=value.dtype, device=flat.device)
                part = state[key] if apart else self.layout.part(p, state[key])
                part.copy_(value.reshape(-1)[share.start : share.stop])
                self._collapse(p, key, value)

    def _counts_on(self, member: torch.Tensor, flat: torch.Tensor) -> torch.device:
        """Where torch has the number of steps of a piece: beside it, if a kernel reads it."""
        group = next(group for group in self.user.param_groups if any(p is member for p in group["params"]))
        options = {**group, **self.inner.overrides}
        by_kernel = options.get("fused") or options.get("capturable")
        return flat.device if by_kernel else torch.device("cpu")

    # -- showing -------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """The user's state as the notebook knows it. Not collective."""
        for p in self._members():
            number = self.layout.shares[id(p)].flat
            if state := self.inner.state_of(number, p):
                self._show_one(number, p, state, self.user.state[p])

    def _show_one(self, number: int, p: torch.Tensor, state: dict[str, Any], own: dict[str, Any]) -> None:
        sizes = self.inner.size(number, p), 0  # nothing of what is on a disk is here
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() in sizes:
                if not self._stands(own.get(key), p, key):
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
        self.shown[id(tensor)] = tensor, p, key

    def _stands(self, value: Any, p: torch.Tensor, key: str) -> bool:
        """Whether it stands for this very piece."""
        _, of, name = self.shown.get(id(value), (None, None, None))
        return of is p and name == key

    # -- a cell ------------------------------------------------------------------------

    def close_to_cell(self) -> None:
        """What only stands for the state (its zeros, and counts that do not go on) says so to whoever asks it."""
        self.made = self.inner.made()
        for *_, value in self._tensors():
            if type(value) is torch.Tensor:
                value.__class__ = HeldState
                self.closed.append(value)
        self.open = self.user.state
        entries = {p: ClosedState(None, entry) for p, entry in self.open.items()}
        self.user.state = ClosedState(dict, entries)

    def begin(self) -> None:
        """After a step: it may have made a state, and goes on without what `state_dict()` has given."""
        if self.given:
            self.forget()
        if self.inner.made() != self.made:
            self.open_again()
            self.show()
            self.close_to_cell()

    def follow(self) -> None:
        """Take in another state that the cell has put there, or has written to a state dict."""
        if not isinstance(self.user.state, ClosedState) or (self.given and self._edited()):
            self.open_again()
            self.close_to_cell()

    def _edited(self) -> bool:
        return any(given.edited() for given in self.given)

    def _write_given(self) -> None:
        """What was written to a state dict is the optimizer's: another state, with that in it."""
        edited = {given.p: given.entry for given in self.given if given.edited()}
        wrote_whole(value for entry in edited.values() for value in entry.values())
        written = {p: {key: _copied(value) for key, value in entry.items()} for p, entry in edited.items()}
        self.user.state = defaultdict(dict, {**self.open, **written})
        self.forget(edited)
        self.given += [Given(p, entry) for p, entry in edited.items()]

    def forget(self, of: Collection[torch.Tensor] | None = None) -> None:
        """The optimizer goes on without what `state_dict()` has given, and to use it is refused; `of`: of these
        parameters, where it was not written to."""
        gone = [given for given in self.given if of is None or given.p in of]
        if of is not None and sum(given.edited() for given in gone) > len(of):
            raise NotSupported(KeptState.refusal)
        tensors.become((t for given in gone if of is None or not given.edited() for t in given.tensors()), KeptState)
        self.given = [] if of is None else [given for given in self.given if given.p not in of]

    def loaded(self) -> None:
        """A state dict was loaded, which every rank has whole."""
        wrote_whole(value for entry in self.user.state.values() for value in entry.values())
        self.follow()

    def open_again(self) -> None:
        if not isinstance(self.user.state, ClosedState):
            self.given.clear()
        elif self._edited():
            self._write_given()
        for value in self.closed:
            value.__class__ = torch.Tensor
        self.closed.clear()
        loaded, self.user.state = self.user.state, self.open
        if not isinstance(loaded, ClosedState):
            self.show()  # a dict that was loaded may have the very tensors, whose counts did not go on
            self.user.state = loaded
            self._take_of_cell()

    def _take_of_cell(self) -> None:
        """The cell has put another state in the place of this one, which is refused to whoever has kept it."""
        here, left = {id(value) for *_, value in self._tensors()}, self._left()
        if any(id(tensor) in here for tensor, *_ in left):
            self.user.state = self.open
            raise NotSupported(STATE)
        self._check_alone()
        for tensor, *_ in left:
            tensor.__class__ = HeldState
            del self.shown[id(tensor)]
        self._take()

    # -- pieces --------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, SharePart]]:
        """Wherever the tensors are by now."""
        return ((tensor, self._piece(tensor, p, key)) for tensor, p, key in self.shown.values())

    def _piece(self, tensor: torch.Tensor, p: torch.Tensor, key: str) -> SharePart:
        share = self.layout.shares[id(p)]
        if self.inner.is_apart(share.flat):
            share = replace(share, at=0)
        part, filled = partial(self._part, share.flat, p, key), partial(self._filled, p, key)
        return self.layout.piece(share, p.shape, tensor.dtype, part, filled)

    def _filled(self, p: torch.Tensor, key: str, full: torch.Tensor) -> None:
        """A block has shown it complete: what it has written there is in a state dict, too."""
        for given in self.given:
            if given.p is p and not given.edited() and isinstance(kept := given.was.get(key), torch.Tensor):
                kept.copy_(full.view(kept.shape))
                given.noted()

    def _part(self, number: int, p: torch.Tensor, key: str) -> torch.Tensor:
        value: torch.Tensor = self.inner.state_of(number, p)[key]
        return value

    def hook_state_dicts(self, device: torch.device) -> list[Any]:
        """For a cell: `state_dict()` puts one tensor after the other together, and keeps it in main memory; what is
        loaded goes into the pieces. Returns handles."""

        def show(_: Any) -> None:
            self.open_again()
            self.show()

        @torch.no_grad()
        def fill(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            full = {id(value): full_tensor(piece, device).cpu() for value, piece in self.pieces()}

            def kept(value: Any) -> Any:
                return full[id(value)] if id(value) in full else _copied(value)

            entries = {
                n: {key: kept(value) for key, value in entry.items()} for n, entry in state_dict["state"].items()
            }
            parameters = [p for group in self.user.param_groups for p in group["params"]]
            self.given += [Given(parameters[n], entry) for n, entry in entries.items() if isinstance(n, int)]
            self.close_to_cell()
            return {**state_dict, "state": dict(sorted(entries.items()))}

        return [
            self.user.register_state_dict_pre_hook(show),
            self.user.register_state_dict_post_hook(fill),
            self.user.register_load_state_dict_post_hook(lambda _: self.loaded()),
        ]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def kept_once(parameters: Iterable[torch.Tensor], state: Mapping[Any, Any], counts: set[str]) -> list[Any]:
    """What the state of each parameter has once, and not for each element (the count of steps). Those that agree in it
    can have one state together."""

    def of(key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value) if key in counts and value.numel() == 1 else "one for each element"
        return value if isinstance(value, int | float | None) else repr(value)

    return [frozenset((key, of(key, value)) for key, value in (state.get(p) or {}).items()) for p in parameters]


def _counts(states: list[tuple[torch.Tensor, Any]]) -> set[str]:
    """Keys under which the state has one number for a parameter of any shape. Those of a parameter that is a single
    number itself do not tell."""
    counts = {
        key
        for p, own in states
        for key, value in own.items()
        if isinstance(value, torch.Tensor) and not value.dim() and p.dim()
    }
    return counts | {"step", "mu_product", "eta", "mu"}
