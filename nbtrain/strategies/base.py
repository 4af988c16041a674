"""What a strategy is: how many ranks train one model as if they were one process.

A strategy knows nothing of engines, notebooks or views. Two classes: a `Strategy` (one per pool) sets components up; a
`Prepared` (one per component) lives as long as the component does. A strategy that trains writes three members:
`Strategy.set_up`, `Prepared.backward`, and `Prepared.replicas`, or `pieces` where no rank has the whole. All others
have defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nbtrain.compat.modules import tensors_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbtrain.specs import RankInfo
    from nbtrain.strategies.memory_estimate import Estimate, Profile, World


STANDS_IN = "nbtrain_stands_in"
"""An attribute of an ordinary tensor that an optimizer is given for the length of one step, in a parameter's place, or
for a trial."""


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
        found: list[torch.Tensor] = [p for module in self.modules.values() for p in tensors_of(module)[0]]
        found += self.loose.values()
        return list({id(p): p for p in found if not is_lazy(p)}.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of modules, by the names that the notebook has for them."""
        for where, module in self.modules.items():
            for name, p in module.named_parameters():
                yield f"{where}.{name}", p

    def buffers(self) -> list[torch.Tensor]:
        found = [b for module in self.modules.values() for b in tensors_of(module)[1]]
        return list({id(b): b for b in found if not is_lazy(b)}.values())


class Piece(ABC):
    """What a rank keeps of a tensor that the notebook has whole: a part of it, or all of it in another precision.

    The tensor that the module or the optimizer holds in its place says the whole's shape; its content is not looked at.
    """

    shape: torch.Size
    dtype: torch.dtype
    """of the whole tensor, as the notebook has it"""
    cut: object = None
    """as long as it is the same object, every rank keeps the same ranges"""

    @abstractmethod
    def ranges(self) -> Sequence[tuple[int, int]]:
        """(start, stop) in the flattened whole of what this rank keeps. Of several ranks that keep the same, only the
        first has ranges."""

    @abstractmethod
    def read(self) -> Sequence[torch.Tensor]:
        """One flat tensor for each of the ranges. Not collective."""

    @abstractmethod
    def fill(self, whole: torch.Tensor) -> None:
        """Take this rank's part out of the whole, which every rank is given on the CPU, and which is read-only. Not
        collective."""


class Prepared:
    """One component under one strategy. Each member runs on a rank."""

    divides_gradients: ClassVar[bool] = False
    """True: a rank has only some of the gradients. So an optimizer that the cell makes has to be set up, too: it would
    step only what its rank has."""

    averages_before_step: ClassVar[bool] = False
    """True: gradients are averaged before a step, also before one in the middle of a backward"""

    hooks_see_own_gradients: ClassVar[bool] = False
    """True: a hook on a parameter's gradient runs before the ranks average it"""

    drops_graphs: ClassVar[bool] = False
    """True: `p.grad` has no graph after `loss.backward(create_graph=True)`"""

    sends_in_step: ClassVar[bool] = False
    """True: the ranks bring a step together (hooks around it, tensors in pieces). torch.compile leaves it as it is: it
    would look into what is sent"""

    def __init__(self, component: Component) -> None:
        self.component = component
        self.notes: list[str] = []
        """sentences for the user about how it was set up; whoever shows them empties the list"""
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(old, new) of tensors that `set_up`, `grow` or `close` has replaced: the caller gives the new one to whoever
        holds the old one"""

    # --- what a strategy writes ------------------------------------------------------------------

    def backward(self) -> AbstractContextManager[float]:
        """Around each backward: yields what the loss is multiplied by."""
        return nullcontext(1.0)

    def replicas(self) -> Iterable[tuple[str, torch.Tensor]]:
        """When a cell ends: (name, tensor) of what should be equal on every rank. Checksums are compared."""
        return ()

    def pieces(self) -> Iterable[tuple[torch.Tensor, Piece]]:
        """After `leave`: every tensor that has another content here than in the notebook, in the same order on all
        ranks."""
        return ()

    # --- in the loop -----------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Around backwards that do not communicate: `--accumulate` uses it for all but the last."""
        return nullcontext()

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply the gradients of these parameters, also those that `no_sync` holds back."""
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(factor)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """Called before `clip_grad_norm_`: clips and returns the norm. None: torch's own function is right. With the
        `max_norm` inf only the norm is asked for, and it may be called again with another."""
        return None

    def before_clip_value(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called before `clip_grad_value_`; raises where that would not be right."""

    def differentiated(self, outputs: Iterable[Any], inputs: Sequence[Any], found: Sequence[Any]) -> Sequence[Any]:
        """Called after `torch.autograd.grad`, which found the gradients of this rank's batch. Returns what it gives."""
        return found

    def about_to_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step of any optimizer, and when its groups have other parameters than before: raises where
        it would not step what it holds."""

    def reset(self) -> None:
        """Forget a backward that an exception may have cut short."""

    # --- around cells ----------------------------------------------------------------------------

    def enter(self) -> None:
        """Before each cell, the first one too: put in place what trains. Collective."""

    def leave(self) -> None:
        """After each cell, however it ended: leave modules and optimizers as the notebook knows them (classes, hooks,
        groups and states), but for the content of what is in pieces. Not collective; the cell may have been cut short
        anywhere."""

    def pause(self) -> None:
        """In the middle of a cell, before `enter`: as `leave`, but gradients, their sums and norms stay. Raises where
        they cannot; so does `close`, before `enter`. Not collective."""
        self.leave()

    # --- a component that changes ----------------------------------------------------------------

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the component's optimizer still holds what it held when it was set up, where that matters."""
        return True

    def grow(self, component: Component) -> bool:
        """Optimizers or schedulers were added to the same modules. False: it has to be set up again."""
        return False

    def release_modules(self) -> Callable[[], Prepared | None] | None:
        """Hold none of the component's modules, except through the component, until the returned function is called:
        what the garbage collector finds until then was held by nobody else. That may be this object, too, if only the
        modules hold it: then the function returns None, otherwise this object. None: this object holds no modules."""
        return None

    def close(self) -> None:
        """Before the component is dropped or set up differently, always after `leave`: make what is in pieces whole on
        every rank. Collective."""

    def drop(self) -> None:
        """As `close`, where nobody uses the component any more, and the other ranks may be gone."""
        self.close()


class Strategy:
    """What ranks do to train one model. Made once per pool and options, on every rank."""

    hands_off: ClassVar[bool] = False
    """True: models, optimizers and loaders are left as they are, and nothing is guarded"""

    own_precision: ClassVar[bool] = False
    """True: `set_up` applies the precision. Otherwise nbtrain does, and `set_up` is only told its name"""

    threads: ClassVar[bool] = False
    """True: a model is computed in threads, which do not see what is set for the cell's own thread"""

    moves: ClassVar[bool] = False
    """True: `set_up` finds the component on the CPU and moves it to the rank's device"""

    empty_weights: Literal["filled", "hollow", "meta"] = "filled"
    """How `set_up` finds tensors that have no content yet (`nbtrain.empty()`): filled; hollow, with one number in
    memory; or on the device meta, as they are. A rank that gets them hollow or on meta is given its part afterwards,
    so that no rank ever has the whole."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        """The strategy's flags, one field each."""

    place: RankInfo
    """which rank this is; set before any of the following is called on a rank"""

    def __init__(self, options: Any = None, **given: Any) -> None:
        """`DDP(bucket_mb=5)`, which is `DDP(DDP.Options(bucket_mb=5))`."""
        self.options: Any = self.Options(**given) if options is None else options

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        """Set a component up, before the cell runs. It is on the rank's device already, with the same numbers on every
        rank. Objects keep their identity, and tensors where they can (see `replaced`). `enter` is called on what is
        returned. Collective."""
        return Prepared(component)

    def share(self, rank: int, world_size: int) -> tuple[int, int]:
        """(index, count) of the batches this rank sees, for every loader. Ranks with the same index also draw the same
        random numbers, so that a cell does the same with a batch on each of them."""
        return rank, world_size

    def enter(self) -> None:
        """Before each cell, whatever it uses, and before any `Prepared.enter`. Collective."""

    def leave(self) -> None:
        """After each cell, however it ended, and after every `Prepared.leave`. Not collective."""

    def explain(self, error: BaseException) -> None:
        """A cell has raised this: where users would not understand it, say it in other words, in `error.args`."""

    @classmethod
    def for_nodes(cls, options: dict[str, Any], nodes: int) -> dict[str, Any]:
        """In the notebook: the options that were typed, with defaults that depend on the number of nodes."""
        return options

    def estimate(self, profile: Profile, world: World) -> Estimate | None:
        """What the rank with the most will hold, and what one rank sends, with these options; None if that is unknown.
        Arithmetic only: it is called in the notebook, before there are ranks (and `place`). Raises a `UsageError`
        where the model cannot be trained like that."""
        return None
