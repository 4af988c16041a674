"""Tensors that a block `with whole(…)` shows complete: weights, buffers, an optimizer's states, and gradients.

Outside of the block a rank keeps a piece of each. They are put together when it begins; at its end the ranks compare
what has become of them, and each takes its part.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import NotSupported
from nbtrain.compat.dtensor import is_divided
from nbtrain.strategies.base import Component, Piece, Prepared, Shards
from nbtrain.strategies.kit.component_tensors import named_parameters
from nbtrain.strategies.kit.memory_left_behind import SHOWN
from nbtrain.strategies.kit.owned_tensors import full_tensor
from nbtrain.strategies.kit.same_on_ranks import differing
from nbtrain.worker.ranks import collectives
from nbtrain.worker.setup.component_form import tensors_in_state

OWN = (
    "inside of `with whole(…)` the ranks have made different numbers of {name}, and each keeps its part of it: write "
    "what is the same on every rank, as reduce(value) is. torch's random numbers are the same there; numpy's are not"
)
DIFFERENT = (
    "the ranks name different objects in `with whole(…)`, and each has a part of them only: write the same on every "
    "rank, not below `if rank == 0:`"
)
CHANGED = (
    "inside of `with whole(…)` the ranks have changed different things (layers, what is trained, an optimizer's groups "
    "or states, which gradients there are), and each has a part of them only: change the same on every rank, not below "
    "`if rank == 0:`"
)
RESHAPED = (
    "{name} was given another shape or dtype inside of `with whole(…)`: it is {shape}, {dtype} now. Do it in a cell "
    "before, which is not distributed"
)
FORWARD = (
    "a backward through what was computed of weights inside of `with whole(…)`, where they are complete tensors for as "
    "long as the block: write the forward below it, too. Of a penalty that needs complete tensors write the gradient "
    "by hand: `with whole(model, gradients=True): p.grad.add_(…)`"
)
GIVEN = (
    "{name} was given a gradient inside of `with whole(…)`, and it had none: ranks keep parts of those that a backward "
    "has made. Let one make it before the block, `(p * 0).sum().backward()`, and write `p.grad = …` inside of "
    "with whole(…, gradients=True)"
)
TIED = (
    "{name} was given the memory of {other} inside of `with whole(…)`: in one process they would be one tensor from "
    "there on, and ranks keep parts of two. Give it a copy: b.data = a.data.clone(); or tie them in the model, "
    "layer.weight = other.weight"
)
NO_MEMORY = (
    "there is not enough memory for all that `with whole(…)` names, which needs {needed:,.0f} MB on every rank: name a "
    "part, with whole(model.head), one after the other"
)


class Shown:
    """A tensor of which a rank has a piece. A block calls `show` when it begins, and at its end `result`, `restore` and
    `take`."""

    # `replace_references` does not look in there.
    __slots__ = ("before", "has_gradient", "is_open", "memory", "name", "piece", "stands", "tensor")

    def __init__(self, tensor: torch.Tensor, piece: Piece, name: str) -> None:
        self.tensor, self.piece, self.name = tensor, piece, name
        self.before: Any = None
        """what it holds outside"""
        self.is_open = False
        self.stands: torch.Tensor | None = None
        """an ordinary tensor in its place, where it is of a class that cannot show a whole"""
        self.has_gradient = False
        self.memory = 0
        """its address when it was shown"""

    @property
    def now(self) -> torch.Tensor:
        return self.tensor if self.stands is None else self.stands

    @property
    def moved(self) -> bool:
        """Whether it was given other memory since."""
        return self.now.data_ptr() != self.memory

    @property
    def apart(self) -> bool:
        """Whether its own numbers are a piece, or none."""
        return not self.piece.everywhere and (not self.is_open or self.stands is not None)

    def show(self, full: torch.Tensor | None) -> None:
        """`full`: None where every rank has it."""
        self.is_open, self.before = True, self.tensor.data
        if full is not None:
            self._put(full)
        self.memory = self.now.data_ptr()

    def _put(self, full: torch.Tensor) -> None:
        if is_divided(self.tensor):
            from nbtrain.strategies.kit.row_shards import as_parameter  # takes long to import

            self.stands = as_parameter(full, self.tensor) if isinstance(self.tensor, nn.Parameter) else full
            self.follow(self.stands)
        else:
            self.tensor.data = full

    def follow(self, computed: Any) -> None:
        """No backward below the block goes through what was computed of it inside."""
        for tensor in tensors_in(computed):
            if tensor.requires_grad and (tensor is self.stands or tensor.grad_fn is not None):
                tensor.register_hook(self._refuse_below)

    def _refuse_below(self, gradient: torch.Tensor) -> None:
        if not self.is_open:
            raise NotSupported(FORWARD)

    def result(self) -> torch.Tensor | None:
        """Not in the memory of another, which is filled with that one's numbers first: `a.data, b.data = b.data, …`."""
        new = self.now.detach()
        return new.clone() if self.moved else new

    def wrong(self, new: torch.Tensor | None, shown: Iterable[Shown]) -> str:
        """The sentence, where what it has become cannot be kept in pieces."""
        if self.stands is not None and self.stands.grad is not None and not self.has_gradient:
            return GIVEN.format(name=self.name)
        if new is not None and (new.shape != self.piece.shape or new.dtype != self.piece.dtype):
            return RESHAPED.format(name=self.name, shape=tuple(new.shape), dtype=new.dtype)
        apart = (
            other_shown
            for other_shown in shown
            if other_shown.now is not self.now and other_shown.memory != self.memory
        )
        other = (
            next((other_shown for other_shown in apart if _overlap(self.now, other_shown.now)), None)
            if self.moved
            else None
        )
        return "" if other is None else TIED.format(name=self.name, other=other.name)

    def restore(self, left: Container[int]) -> None:
        """As before. The caller has it put where another one stands, but for those in `left`, which stay complete."""
        self.is_open = id(self.stands) in left
        if self.stands is None:
            self.tensor.data = self.before
            return
        self.tensor.requires_grad_(self.stands.requires_grad)
        self.stands = None

    def take(self, new: torch.Tensor | None) -> None:
        """This rank's part of what it has become."""
        assert new is not None
        self.piece.fill(new.detach().to("cpu").contiguous())


class ShownGradient(Shown):
    """The same of a gradient, of the parameter `tensor`, which may be shown by `of`."""

    __slots__ = ("of", "prepared")

    def __init__(self, prepared: Shards, p: torch.Tensor, piece: Piece, name: str, of: Shown | None) -> None:
        super().__init__(p, piece, f"the gradient of {name}")
        self.prepared, self.of = prepared, of
        if of is not None:
            of.has_gradient = True

    @property
    def now(self) -> torch.Tensor:
        return self.tensor if self.of is None else self.of.now

    @property
    def moved(self) -> bool:
        return False  # of weights and states only

    @property
    def apart(self) -> bool:
        return not self.is_open

    def show(self, full: torch.Tensor | None) -> None:
        self.is_open, self.before = True, self.tensor.grad
        self.now.grad = None if full is None else full.to(self.now.dtype)  # a model in 16 bits is shown in 32

    def result(self) -> torch.Tensor | None:
        new = self.now.grad
        return new.to(self.piece.dtype) if new is not None and new.dtype == self.now.dtype else new

    def restore(self, left: Container[int]) -> None:
        self.is_open = False
        self.now.grad = None
        shown = self.tensor.data
        if self.before is not None and self.before.dtype != shown.dtype:  # torch wants them to be alike just then
            self.tensor.data = torch.empty((), dtype=self.before.dtype, device=shown.device).expand(shown.shape)
        self.tensor.grad, self.tensor.data = self.before, shown

    def take(self, new: torch.Tensor | None) -> None:
        if new is None:
            self.prepared.drop_gradient(self.tensor)
        else:
            super().take(new)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Also in lists and dicts, and those that one of them shows."""
    if isinstance(value, torch.Tensor):
        yield value
        if (shown := getattr(value, SHOWN, None)) is not None:
            yield from shown()
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])


def _overlap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    here, there = tensor.data_ptr(), other.data_ptr()
    return here < there + other.nbytes and there < here + tensor.nbytes


def in_pieces(prepared: Iterable[Prepared]) -> tuple[list[Shown], list[ShownGradient]]:
    """Tensors, and gradients; in a pause. In the same order on all ranks."""
    by_id: dict[int, Shown] = {}
    gradients = []
    for component in prepared:
        if not isinstance(component, Shards):
            continue
        names = names_of(component.component)
        for tensor, piece in component.pieces():
            by_id[id(tensor)] = Shown(tensor, piece, names.get(id(tensor), "a tensor of an optimizer's state"))
        for p, piece in component.gradient_pieces():
            gradients.append(ShownGradient(component, p, piece, names.get(id(p), "a parameter"), by_id.get(id(p))))
    return [*by_id.values()], gradients


def names_of(component: Component) -> dict[int, str]:
    names = {id(p): name for name, p in reversed([*named_parameters(component)])}
    for name, optimizer in component.optimizers.items():
        for p, key, value in tensors_in_state(optimizer):
            names[id(value)] = f"{name}.state[{names.get(id(p), 'p')}][{key!r}]"
    return names


@torch.no_grad()
def show(chosen: Sequence[Shown], numbers: Sequence[int], shown: list[Shown]) -> None:
    """Put these together, and add them to `shown`. Collective: raises on every rank where `numbers`, which say what was
    chosen, differ, or where one has not enough memory."""
    fulls = iter(_zeros([item for item in chosen if item.apart], numbers))
    for item in chosen:
        full = full_tensor(item.piece, wire(), next(fulls)) if item.apart else None
        shown.append(item)
        item.show(full)


def _zeros(parts: Sequence[Shown], numbers: Sequence[int]) -> list[torch.Tensor]:
    """Flat ones, for the whole of each."""
    tensors: list[torch.Tensor] = []
    try:
        for part in parts:
            tensors.append(torch.zeros(part.piece.shape.numel(), dtype=part.piece.dtype, device=part.tensor.device))
        failed = 0
    except (RuntimeError, MemoryError):
        failed = 1
        tensors.clear()
    others, short = differing([torch.tensor(numbers), torch.tensor(failed)], wire())
    if others:
        raise NotSupported(DIFFERENT)
    if short or failed:
        needed = sum(part.piece.shape.numel() * part.piece.dtype.itemsize for part in parts)
        raise NotSupported(NO_MEMORY.format(needed=needed / 2**20))
    return tensors


def check(
    shown: Sequence[Shown],
    news: Sequence[torch.Tensor | None],
    made: Sequence[torch.Tensor],
    replicas: Mapping[str, torch.Tensor],
) -> None:
    """Raise on every rank where what these became differs, or does not fit, or what a block has `made` differs, or
    what every rank has. Collective."""
    wrong = [item.wrong(new, shown) for item, new in zip(shown, news, strict=True)]
    states = torch.tensor([*(new is None for new in news), *map(bool, wrong)])
    every = [*(torch.empty(0) if new is None else new for new in news), *made, *replicas.values()]
    *apart, others = differing([*every, states], wire())
    if others:
        raise NotSupported(CHANGED)
    if sentence := next(filter(None, wrong), ""):
        raise NotSupported(sentence)
    names = [*(item.name for item in shown), *("a layer or a state that was made there" for _ in made), *replicas]
    for name, differs in zip(names, apart, strict=True):
        if differs:
            raise NotSupported(OWN.format(name=name))


def wire() -> torch.device:
    return collectives.on_the_wire(torch.empty(0))


def ids_of(objects: Iterable[Any]) -> set[int]:
    """Of the tensors that are named, and of optimizers."""
    ids: set[int] = set()
    for item in objects:
        ids.add(id(item))
        if isinstance(item, nn.Module):
            ids |= {id(tensor) for tensor in (*item.parameters(), *item.buffers())}
        elif isinstance(item, Optimizer):
            ids |= {id(value) for *_, value in tensors_in_state(item)}
    return ids
