"""`bf16-true` and `16-true`: keeps the ranks' weights in 16 bits, and the notebook's as they are, under every strategy.

Tensors are cast in place (`tensor.data = …`) before the strategy sets them up, so that references stay right. Between
cells each of them is described by a `Piece`, whole and in the notebook's own dtype; where the strategy has cut it in
pieces, its own are described anew. Parameters that an optimizer holds and no module owns stay as they are: the loop
uses them outside of models, where everything is in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import Component, HoldsModules, Piece, Prepared, Shards, Strategy, is_lazy, pieces_of
from nbtrain.strategies.kit.call_arguments import all_tensors
from nbtrain.strategies.kit.component_tensors import entries
from nbtrain.strategies.kit.owned_tensors import OwnedTensor
from nbtrain.worker.parts import Part


class LowPrecisionWeights(Part):
    """The tensors that were cast on this rank, and their dtypes in the notebook."""

    components: Any
    """those that are set up with it"""

    def __init__(self, dtype: torch.dtype, rank: int) -> None:
        self.dtype = dtype
        self.rank = rank
        self._homes: Any = WeakTensorKeyDictionary()
        """tensor → its dtype in the notebook"""

    def cast(self, component: Component) -> None:
        """Cast what is not cast yet, before the strategy sets the component up or grows it."""
        for tensor in _tensors(component):
            self._cast_to_low(tensor)
        for tensor, parameter in _states(component):
            if self._homes.get(parameter, self.dtype) is not self.dtype and tensor.is_floating_point():
                self._cast_to_low(tensor)

    def settle(self, component: Component) -> None:
        """Note the notebook's dtype of new optimizer states, before they are replaced."""
        for tensor, home in self._all(component).values():
            self._homes[tensor] = home

    def follow(self, replaced: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over the old tensors' dtypes for those that replace them (`Prepared.replaced`)."""
        for old, new in replaced:
            if old in self._homes:
                self._homes[new] = self._homes.pop(old)

    def pieces(
        self, component: Component, own: Iterable[tuple[torch.Tensor, Piece]]
    ) -> Iterator[tuple[torch.Tensor, Piece]]:
        """The strategy's `own` pieces in the notebook's dtype, and one for each other tensor that was cast."""
        homes = self._all(component)
        described = set()
        for tensor, piece in own:
            described.add(id(tensor))
            home = homes.get(id(tensor), (tensor, piece.dtype))[1]
            yield tensor, piece if piece.dtype is home else CastPiece(piece, home)
        for key, (tensor, home) in homes.items():
            blank = tensor.is_meta  # it is filled in where it is
            if key not in described and tensor.dtype is not home and not blank:
                yield tensor, CastPiece(OwnedTensor(tensor, True, self.rank == 0), home)

    def undo(self, tensors: Iterable[torch.Tensor]) -> None:
        """Cast these back to the notebook's dtype."""
        for tensor in tensors:
            home = self._homes.pop(tensor, None)
            if home is not None and tensor.dtype is not home:
                _cast(tensor, home)

    def end(self, ok: bool) -> None:
        """Cast back what belongs to no component: copies that the cell has made."""
        kept = {id(tensor) for one in self.components.prepared for tensor in self.held(one.component)}
        self.undo([tensor for tensor in list(self._homes.keys()) if id(tensor) not in kept])

    def listen(self, listeners: Listeners) -> None:
        """Copies of cast tensors are known as cast."""
        listeners.listen("torch.Tensor.__deepcopy__", "low_precision", self._copied)

    def _copied(self, old: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def deepcopy(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
            copy = old(tensor, memo)
            if tensor in self._homes:
                self._homes[copy] = self._homes[tensor]
            return copy

        return deepcopy

    def held(self, component: Component) -> list[torch.Tensor]:
        """The component's tensors that were cast."""
        return [tensor for tensor, _ in self._all(component).values()]

    def _cast_to_low(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor not in self._homes:
            self._homes[tensor] = tensor.dtype
            if tensor.dtype is not self.dtype:
                _cast(tensor, self.dtype)

    def _all(self, component: Component) -> dict[int, tuple[torch.Tensor, torch.dtype]]:
        """By id, in the same order on all ranks: tensors that were cast or made since, with the notebook's dtype. (A
        strategy may add copies to its component.)"""
        tensors = [t for t in _tensors(component) if t in self._homes or t.dtype is self.dtype]
        by_id = {id(t): (t, self._homes.get(t, torch.float32)) for t in tensors}
        for tensor, parameter in _states(component):
            if parameter in self._homes and tensor.is_floating_point():
                home = self._homes.get(tensor) or (
                    self._homes[parameter] if tensor.dtype is self.dtype else tensor.dtype
                )
                by_id.setdefault(id(tensor), (tensor, home))
        return by_id


class _Forwarding:
    """Passes all methods and attributes on to `inner`, but for those in `OWN`."""

    OWN: ClassVar[frozenset[str]] = frozenset()
    inner: Any

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self).OWN or not hasattr(self.inner, name):
            return super().__getattribute__(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.inner, name, value)


class LowPrecisionStrategy(_Forwarding, Strategy):
    """Another strategy, in 16 bits."""

    inner: Strategy
    OWN = frozenset({"inner", "low_precision", "set_up"})

    def __init__(self, inner: Strategy, low_precision: LowPrecisionWeights) -> None:
        self.inner = inner
        self.low_precision = low_precision

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        self.low_precision.cast(component)
        return LowPrecisionPrepared(self.inner.set_up(component, precision), self.low_precision)


class LowPrecisionPrepared(_Forwarding, Shards):
    """What the other strategy has prepared."""

    inner: Prepared
    OWN = frozenset(
        {"inner", "low_precision", "replaced", "release_modules", "pieces", "grow", "close", "follow"},
    )

    def __init__(self, inner: Prepared, low_precision: LowPrecisionWeights) -> None:
        self.inner = inner
        self.low_precision = low_precision
        self.replaced = []
        self.follow()

    def follow(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if isinstance(self.inner, Shards):
            pairs, self.inner.replaced = self.inner.replaced, []
        self.low_precision.follow(pairs)
        self.replaced += pairs
        return pairs

    def release_modules(self) -> Callable[[], Prepared | None] | None:
        hold_again = self.inner.release_modules() if isinstance(self.inner, HoldsModules) else None
        if hold_again is None:
            return None
        self.inner = Prepared(self.component)  # so that only the modules hold the other one

        def again() -> Prepared | None:
            inner = hold_again()
            if inner is None:
                return None
            self.inner = inner
            return self

        return again

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        return self.low_precision.pieces(self.component, pieces_of(self.inner))

    def grow(self, component: Component) -> bool:
        self.low_precision.cast(component)
        done = isinstance(self.inner, Shards) and self.inner.grow(component)
        if done:
            self.inner.component = component
            self.follow()
        return done

    def close(self, whole: bool = True) -> None:
        if not whole:
            self.inner.close(False)
            return
        self.low_precision.settle(self.component)
        self.inner.close()
        news = [new for _, new in self.follow()]
        self.low_precision.undo([*self.low_precision.held(self.component), *news])


class CastPiece(Piece):
    """Another piece, in the notebook's dtype."""

    def __init__(self, piece: Piece, dtype: torch.dtype) -> None:
        self.piece = piece
        self.shape = piece.shape
        self.dtype = dtype

    def ranges(self) -> Sequence[tuple[int, int]]:
        return self.piece.ranges()

    def read(self) -> Sequence[torch.Tensor]:
        return [part.to(self.dtype) for part in self.piece.read()]

    def fill(self, full: torch.Tensor) -> None:
        self.piece.fill(full.to(self.piece.dtype))


@torch.no_grad()
def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        tensor.grad = None
    data = tensor.data
    if tensor.numel() > 1 and not any(tensor.stride()):  # one number, expanded: `Facts.empty_weights`
        tensor.data = data[(0,) * data.dim()].to(dtype).expand(data.shape)
    else:
        tensor.data = data.to(dtype)
    if gradient is not None:
        gradient.data = gradient.data.to(dtype)
        tensor.grad = gradient


def _tensors(component: Component) -> list[torch.Tensor]:
    """The floating parameters and buffers of the component's modules, each once."""
    tensors = [t for module in component.modules.values() for t in (*module.parameters(), *module.buffers())]
    return [t for t in {id(t): t for t in tensors}.values() if not is_lazy(t) and t.is_floating_point()]


def _states(component: Component) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor of an optimizer's state, its parameter), in the order of the groups, without step counts."""
    for optimizer in component.optimizers.values():
        for parameter, key, value in entries(optimizer):
            if key != "step":
                for tensor in all_tensors(value):  # LBFGS keeps lists of them
                    yield tensor, parameter
