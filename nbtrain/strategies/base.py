"""What a strategy is: how many ranks train one model as if they were one process.

A strategy knows nothing of engines, notebooks or views. Two classes: a `Strategy` (one per pool) sets components up; a
`Prepared` (one per component) lives as long as the component does. A strategy that trains writes two members:
`Strategy.set_up` and `Prepared.backward`; one whose ranks do not have the whole mixes `Shards` into its `Prepared`, and
writes `pieces`. All others have defaults, and these are careful: what a strategy does not
promise (`Promises`) is refused or said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nbtrain.compat.modules import tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbtrain.base.specs import RankInfo
    from nbtrain.strategies.memory_estimate import Estimate, Profile, World


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is of a lazy layer (`LazyLinear`) that has not seen a batch."""
    return hasattr(tensor, "materialize")


@dataclass(slots=True)
class Component:
    """Modules, optimizers and schedulers that belong together. `set_up` changes them in place."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    loose: dict[str, torch.Tensor] = field(default_factory=dict)
    """parameters that an optimizer holds and that no module has"""

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter once, in an order that is the same on every rank. Lazy ones have nothing to train yet."""
        tensors_there: list[torch.Tensor] = [p for module in self.modules.values() for p in tensors_of(module)[0]]
        tensors_there += self.loose.values()
        return list({id(p): p for p in tensors_there if not is_lazy(p)}.values())


class Piece(ABC):
    """What a rank keeps of a tensor that the notebook has whole: a part of it, or all of it in another precision.

    The tensor that the module or the optimizer holds in its place says the whole's shape; its content is not looked at.
    """

    shape: torch.Size
    dtype: torch.dtype
    """of the whole tensor, as the notebook has it"""
    cut: object = None
    """as long as it is the same object, every rank keeps the same ranges"""
    everywhere: bool = False
    """every rank has all of it in the tensor itself, too"""

    @abstractmethod
    def ranges(self) -> Sequence[tuple[int, int]]:
        """(start, stop) in the flattened whole of what this rank keeps. Of several ranks that keep the same, only the
        first has ranges."""

    @abstractmethod
    def read(self) -> Sequence[torch.Tensor]:
        """One flat tensor for each of the ranges. Not collective."""

    @abstractmethod
    def fill(self, full: torch.Tensor) -> None:
        """Take this rank's part out of the whole, which every rank is given on the CPU, and which is read-only. Not
        collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promises:
    """What a cell can count on under a strategy. What is not promised is refused or said, so that nothing goes wrong
    where a strategy says nothing."""

    hooks_see_means: bool = False
    """a hook on a parameter's gradient sees what the ranks have together, not this rank's own"""
    averages_before_step: bool = False
    """gradients are averaged before a step, also before one in the middle of a backward"""
    keeps_graphs: bool = False
    """`p.grad` has a graph after `loss.backward(create_graph=True)`"""
    any_optimizer: bool = False
    """an optimizer that the cell makes of these parameters steps them rightly. Otherwise it is set up, too: it would
    step only what its rank has"""
    steps_alone: bool = False
    """ranks send nothing during a step. Otherwise torch.compile leaves steps as they are: it would look into what is
    sent"""


ALL = Promises(hooks_see_means=True, averages_before_step=True, keeps_graphs=True, any_optimizer=True, steps_alone=True)
"""of one process"""


class Prepared:
    """One component under one strategy. Each member runs on a rank. `Shards` has more, for models in pieces."""

    promises: Promises = Promises()

    def __init__(self, component: Component) -> None:
        self.component = component
        self.notes: list[str] = []
        """sentences for the user about how it was set up; whoever shows them empties the list"""

    def backward(self, sync: bool = True) -> AbstractContextManager[float]:
        """Around each backward: yields what the loss is multiplied by. `sync` False: one of those that `--accumulate`
        adds up, in which nothing need be communicated. A backward that raises, and what it has begun, is forgotten. Has
        to be written where there are several ranks."""
        return nullcontext(1.0)

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """When a cell ends: (name, tensor) of what should be equal on every rank. Checksums are compared."""
        named = [
            (f"{where}.{name}", tensor)
            for where, module in self.component.modules.items()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        return [(name, tensor) for name, tensor in (*named, *self.component.loose.items()) if not is_lazy(tensor)]

    # --- in the loop -----------------------------------------------------------------------------

    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before the gradients of these parameters are clipped, or shown (`with whole(…, gradients=True)`): they are
        what a step would take. Collective."""

    # --- around cells ----------------------------------------------------------------------------

    def enter(self) -> None:
        """Before each cell, the first one too, and after each pause: put in place what trains. Collective."""

    def leave(self, pause: bool = False) -> None:
        """After each cell, however it ended: leave modules and optimizers as the notebook knows them (classes, hooks,
        groups and states), but for the content of what is in pieces. Not collective; the cell may have been cut short
        anywhere. `pause`: in its middle, before `enter`: gradients, their sums and norms stay. Raises where they
        cannot; so does `close`, before `enter`."""

    def close(self, whole: bool = True) -> None:
        """Before the component is dropped or set up differently, always after `leave`; in the middle of a cell that was
        one of a pause, and what it has left in place (hooks) goes now. `whole`: make what is in pieces whole on every
        rank (`full_tensor` in kit/owned_tensors.py), collective; otherwise nobody uses it any more, and the other ranks
        may be gone."""


class HoldsModules(Prepared):
    """A component whose `Prepared` has its modules at other places than in the component, too."""

    def release_modules(self) -> Callable[[], Prepared | None] | None:
        """Hold none of the component's modules, except through the component, until the returned function is called:
        what the garbage collector finds until then was held by nobody else. That may be this object, too, if only the
        modules hold it: then the function returns None, otherwise this object. None: this object holds no modules."""
        return None


class Shards(HoldsModules):
    """A component of which no rank has the whole, or has it where the notebook does not: mixed into a `Prepared`."""

    stepped_by: Mapping[torch.optim.Optimizer, Set[int]] | None = None
    """the only optimizers that can step it, each with the ids of what it has to hold; None: any, with any parameters"""

    def __init__(self, component: Component) -> None:
        super().__init__(component)
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(old, new) of tensors that `set_up`, `grow` or `close` has replaced: the caller gives the new one to whoever
        holds the old one"""

    def pieces(self) -> Iterable[tuple[torch.Tensor, Piece]]:
        """After `leave`: every tensor that has another content here than in the notebook, in the same order on all
        ranks. Has to be written. A cell must not compute with such a tensor: one that refuses to be read is in
        kit/owned_tensors.py."""
        raise NotImplementedError

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ()

    def gradient_pieces(self) -> Iterable[tuple[torch.Tensor, Piece]]:
        """In a pause: (parameter, what this rank keeps of its gradient), of all that have one, in the same order on all
        ranks; only where a rank has not the whole in `p.grad`."""
        return ()

    def drop_gradient(self, p: torch.Tensor) -> None:
        """In a pause: this one of `gradient_pieces` was set to None."""
        p.grad = None

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float | None) -> torch.Tensor | None:
        """Called before `clip_grad_norm_`: clips and returns the norm. None: torch's own function is right. With the
        `max_norm` inf only the norm is asked for, and it may be called again with another. `norm_type` None: before
        `clip_grad_value_`; raises where that would not be right."""
        self.complete_gradients(parameters)
        return None

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply the gradients of these parameters, also those that a backward without `sync` holds back."""
        multiply(parameters, factor)

    def grow(self, component: Component) -> bool:
        """In a pause: optimizers or schedulers were added to the same modules. False: it has to be set up again."""
        return False


def multiply(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """The gradients of these."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor)


def pieces_of(prepared: Prepared) -> Iterable[tuple[torch.Tensor, Piece]]:
    return prepared.pieces() if isinstance(prepared, Shards) else ()


def gradient_pieces_of(prepared: Prepared) -> Iterable[tuple[torch.Tensor, Piece]]:
    return prepared.gradient_pieces() if isinstance(prepared, Shards) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """How a strategy goes about it."""

    hands_off: bool = False
    """models, optimizers and loaders are left as they are, and nothing is guarded"""
    own_precision: bool = False
    """`set_up` applies the precision. Otherwise nbtrain does, and `set_up` is only told its name"""
    threads: bool = False
    """a model is computed in threads, which do not see what is set for the cell's own thread"""
    batch_per: Literal["rank", "node", "pool"] = "rank"
    """Each rank sees batches of its own; or those of a node see the same, or all of them. Ranks that see the same also
    draw the same random numbers, so that a cell does the same with a batch on each of them."""
    moves: bool = False
    """`set_up` finds the component on the CPU and moves it to the rank's device"""
    empty_weights: Literal["filled", "hollow", "meta"] = "filled"
    """How `set_up` finds tensors that have no content yet (`nbtrain.empty()`): filled; hollow, with one number in
    memory; or on the device meta, as they are. A rank that gets them hollow or on meta is given its part afterwards,
    so that no rank ever has the whole."""


class Strategy:
    """What ranks do to train one model. Made once per pool and options, on every rank."""

    facts: Facts = Facts()

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        """The strategy's flags, one field each. A class method `for_nodes(options, nodes)` is called in the notebook
        with what was typed, where defaults depend on the number of nodes."""

    place: RankInfo
    """which rank this is; set before any of the following is called on a rank"""

    def __init__(self, options: Any = None, **given: Any) -> None:
        """`DDP(bucket_mb=5)`, which is `DDP(DDP.Options(bucket_mb=5))`."""
        self.options: Any = self.Options(**given) if options is None else options

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        """Set a component up, before the cell runs. It is on the rank's device already, with the same numbers on every
        rank. Objects keep their identity, and tensors where they can (see `Shards.replaced`). `enter` is called on
        what is returned. Collective."""
        return Prepared(component)

    def running(self) -> AbstractContextManager[None]:
        """Around each cell, whatever it uses, and around every `Prepared.enter` and `leave`. To enter it is collective,
        to leave it is not: the cell may have ended anyhow."""
        return nullcontext()

    def estimate(self, profile: Profile, world: World) -> Estimate | None:
        """What the rank with the most will hold, and what one rank sends, with these options; None if that is unknown.
        Arithmetic only: it is called in the notebook, before there are ranks (and `place`). Raises a `UsageError`
        where the model cannot be trained like that."""
        return None


def share_of(strategy: Strategy, rank: int, world_size: int) -> tuple[int, int]:
    """(index, count) of the batches that this rank sees."""
    per = strategy.facts.batch_per
    count = world_size if per == "rank" else strategy.place.nodes if per == "node" else 1
    return rank * count // world_size, count
