"""`bf16-true` and `16-true`: the ranks' weights in 16 bits, the notebook's as they are. For every strategy alike: what
it sets up was cast before, and what it has prepared is described in the notebook's dtype.

Tensors are cast in place (`tensor.data = …`), so that everybody who holds one goes on holding the right one. Between
cells each of them is described by a `Piece`, whole and in the notebook's own dtype; where the strategy has cut it in
pieces, its own are described anew. Parameters that an optimizer holds and no module owns stay as they are: the loop
uses them outside of models, where everything is in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.intercept import Listeners
from nbtrain.strategies.base import Component, Piece, Prepared, Strategy, is_lazy


class LowPrecisionWeights:
    """What was cast on this rank, and what it is in the notebook."""

    def __init__(self, dtype: torch.dtype, rank: int) -> None:
        self.dtype = dtype
        self.rank = rank
        self._homes: Any = WeakTensorKeyDictionary()
        """tensor → its dtype in the notebook"""

    def before(self, component: Component) -> None:
        """Cast what is not yet: before the strategy sets the component up, or is told that it has grown."""
        for tensor in _tensors(component):
            self._lower(tensor)
        for tensor, parameter in _states(component):
            if self._homes.get(parameter, self.dtype) is not self.dtype and tensor.is_floating_point():
                self._lower(tensor)

    def settle(self, component: Component) -> None:
        """Note of states that have come to be since what they are in the notebook: before they are replaced."""
        for tensor, home in self._all(component).values():
            self._homes[tensor] = home

    def follow(self, replaced: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The strategy has put other tensors in the place of some (`Prepared.replaced`): what was known of the old is
        known of the new."""
        for old, new in replaced:
            if old in self._homes:
                self._homes[new] = self._homes.pop(old)

    def pieces(
        self, component: Component, own: Iterable[tuple[torch.Tensor, Piece]]
    ) -> Iterator[tuple[torch.Tensor, Piece]]:
        """The strategy's `own`, and those of all that is in 16 bits for no other reason than `--precision`."""
        homes = self._all(component)
        described = set()
        for tensor, piece in own:
            described.add(id(tensor))
            home = homes.get(id(tensor), (tensor, piece.dtype))[1]
            yield tensor, piece if piece.dtype is home else Raised(piece, home)
        for key, (tensor, home) in homes.items():
            blank = tensor.is_meta  # it is filled in where it is
            if key not in described and tensor.dtype is not home and not blank:
                yield tensor, WholeTensor(tensor, home, self.rank == 0)

    def undo(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are in the notebook's dtype again."""
        for tensor in tensors:
            home = self._homes.pop(tensor, None)
            if home is not None and tensor.dtype is not home:
                _cast(tensor, home)

    def release(self, components: Iterable[Component]) -> None:
        """When a cell ends: what was cast and belongs to none of these is a copy that the cell has made."""
        kept = {id(tensor) for component in components for tensor in self.held(component)}
        self.undo([tensor for tensor in list(self._homes.keys()) if id(tensor) not in kept])

    def listen(self, listeners: Listeners) -> None:
        """A copy of what was cast was cast."""
        listeners.listen("torch.Tensor.__deepcopy__", "lowered", self._copied)

    def _copied(self, old: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def deepcopy(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
            copy = old(tensor, memo)
            if tensor in self._homes:
                self._homes[copy] = self._homes[tensor]
            return copy

        return deepcopy

    def held(self, component: Component) -> list[torch.Tensor]:
        """Of the component: what was cast."""
        return [tensor for tensor, _ in self._all(component).values()]

    def _lower(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor not in self._homes:
            self._homes[tensor] = tensor.dtype
            if tensor.dtype is not self.dtype:
                _cast(tensor, self.dtype)

    def _all(self, component: Component) -> dict[int, tuple[torch.Tensor, torch.dtype]]:
        """By id, in the same order on all ranks: what was cast, and what has come to be since. (A strategy may take
        copies into its component that it makes in its own way.)"""
        tensors = [t for t in _tensors(component) if t in self._homes or t.dtype is self.dtype]
        found = {id(t): (t, self._homes.get(t, torch.float32)) for t in tensors}
        for tensor, parameter in _states(component):
            if parameter in self._homes and tensor.is_floating_point():
                home = self._homes.get(tensor) or (
                    self._homes[parameter] if tensor.dtype is self.dtype else tensor.dtype
                )
                found.setdefault(id(tensor), (tensor, home))
        return found


T = TypeVar("T", bound=type)


def _around(base: type) -> Callable[[T], T]:
    """Of a class around an `inner` one: what `base` has and it does not say is the inner one's. So whatever strategies
    are given to say one day is forwarded already."""

    def forwarded(name: str) -> property:
        return property(lambda self: getattr(self.inner, name))

    def complete(cls: T) -> T:
        for name in vars(base):
            if not name.startswith("__") and name not in vars(cls):
                setattr(cls, name, forwarded(name))
        return cls

    return complete


class _Around:
    """Attributes, too: only `own` are not the inner one's."""

    own: ClassVar[tuple[str, ...]] = ("inner", "lowered")

    def __getattr__(self, name: str) -> Any:
        if name in self.own:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.own:
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)


@_around(Strategy)
class LowPrecisionStrategy(_Around, Strategy):
    """Another strategy's, in 16 bits."""

    def __init__(self, inner: Strategy, lowered: LowPrecisionWeights) -> None:
        self.inner = inner
        self.lowered = lowered

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        self.lowered.before(component)
        return LowPrecisionPrepared(self.inner.set_up(component, precision), self.lowered)


@_around(Prepared)
class LowPrecisionPrepared(_Around, Prepared):
    """What the other strategy has prepared."""

    own = (*_Around.own, "replaced")

    def __init__(self, inner: Prepared, lowered: LowPrecisionWeights) -> None:
        self.inner = inner
        self.lowered = lowered
        self.replaced = []
        self._follow()

    def _follow(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs, self.inner.replaced = self.inner.replaced, []
        self.lowered.follow(pairs)
        self.replaced += pairs
        return pairs

    def release_modules(self) -> Callable[[], Prepared | None] | None:
        hold_again = self.inner.release_modules()
        if hold_again is None:
            return None
        self.inner = Prepared(self.component)  # perhaps only the modules hold the other one now

        def again() -> Prepared | None:
            inner = hold_again()
            if inner is None:
                return None
            self.inner = inner
            return self

        return again

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        return self.lowered.pieces(self.component, self.inner.pieces())

    def grow(self, component: Component) -> bool:
        self.lowered.before(component)
        done = self.inner.grow(component)
        if done:
            self.inner.component = component
            self._follow()
        return done

    def close(self) -> None:
        self.lowered.settle(self.component)
        self.inner.close()
        news = [new for _, new in self._follow()]
        self.lowered.undo([*self.lowered.held(self.component), *news])


class WholeTensor(Piece):
    """A tensor that every rank has whole, in another dtype than the notebook."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, speaks: bool) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self.dtype = dtype
        self.speaks = speaks

    def ranges(self) -> Sequence[tuple[int, int]]:
        return [(0, self.tensor.numel())] if self.speaks else []

    def read(self) -> Sequence[torch.Tensor]:
        return [self.tensor.detach().reshape(-1).to(self.dtype)] if self.speaks else []

    @torch.no_grad()
    def fill(self, whole: torch.Tensor) -> None:
        self.tensor.detach().copy_(whole.reshape(self.shape))


class Raised(Piece):
    """A strategy's own piece, in the notebook's dtype."""

    def __init__(self, piece: Piece, dtype: torch.dtype) -> None:
        self.piece = piece
        self.shape = piece.shape
        self.dtype = dtype

    def ranges(self) -> Sequence[tuple[int, int]]:
        return self.piece.ranges()

    def read(self) -> Sequence[torch.Tensor]:
        return [part.to(self.dtype) for part in self.piece.read()]

    def fill(self, whole: torch.Tensor) -> None:
        self.piece.fill(whole.to(self.piece.dtype))


@torch.no_grad()
def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None
    data = tensor.data
    if tensor.numel() > 1 and not any(tensor.stride()):  # one number, expanded: `Strategy.empty_weights`
        tensor.data = data[(0,) * data.dim()].to(dtype).expand(data.shape)
    else:
        tensor.data = data.to(dtype)
    if gradient is not None:
        gradient.data = gradient.data.to(dtype)
        tensor.grad = gradient


def _tensors(component: Component) -> list[torch.Tensor]:
    """Of the component's modules: parameters and floating buffers, each once."""
    found = [t for module in component.modules.values() for t in (*module.parameters(), *module.buffers())]
    return [t for t in {id(t): t for t in found}.values() if not is_lazy(t) and t.is_floating_point()]


def _states(component: Component) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor of an optimizer's state, the parameter it is for), in the order of the groups; but step counts."""
    for optimizer in component.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in (optimizer.state.get(parameter) or {}).items():
                    if key != "step":
                        for tensor in _flat(value):
                            yield tensor, parameter


def _flat(value: Any) -> Iterator[torch.Tensor]:
    """LBFGS keeps lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _flat(part)
