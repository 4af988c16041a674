"""Moves tensors whose content this side keeps in pieces, or otherwise than the other side has it.

The other side has an ordinary tensor and never hears of it. Here the tensor only says the shape; `ObjectTable.apart`
knows whether its content has changed, and how all of it is had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.base.errors import CannotTravel
from nbtrain.exchange.kinds import gradient_hooks
from nbtrain.exchange.kinds.base import NOTHING, Kind, Later, Node, Nodes, Receiver, Sender
from nbtrain.exchange.kinds.tensors import STORAGE, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class SplitTensor:
    """A tensor in pieces, and how its whole content is fetched."""

    def __init__(
        self, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype, fetch: Callable[[SplitTensor], memoryview]
    ) -> None:
        self.tensor = tensor
        """held, so that no other one can take over its id"""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.changed = False
        """the other side has something else"""
        self.arrived: torch.Tensor | None = None
        """what the other side has now, and this one has not taken over yet"""
        self.place = MemoryPlace(self)
        self._fetch = fetch

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def later(self) -> Later:
        return Later(self.nbytes, lambda: self._fetch(self), self)


class MemoryPlace:
    """Stands for the memory that the other side's tensor shows."""

    def __init__(self, of: SplitTensor) -> None:
        self.of = of


class PlaceKind(Kind):
    """The kind of `MemoryPlace`; the other side makes a storage."""

    name = "place"
    sent_as = "storage"
    whole = constant = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        apart = node.obj.of
        if walk.quiet:
            return None
        device = apart.tensor.device.type
        if device == "xla":  # which the other side must not touch
            device = "cpu"
        return device, apart.nbytes, walk.buffer(apart.later()) if apart.nbytes else None


class SplitTensorKind(Kind):
    """The kind of a tensor in pieces; the other side makes an ordinary tensor."""

    name = "apart"
    sent_as = "tensor"
    whole = leaf = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        import torch

        apart = walk.table.apart[id(node.obj)]
        ref = walk.encode(apart.place)
        hooks = gradient_hooks.encoded(node.obj, walk)
        if walk.quiet:
            return None
        node.seen = _state(node, apart, hooks)
        window = 0, apart.shape, torch.empty(apart.shape, device="meta").stride(), False, False
        requires_grad = node.seen[2]
        return isinstance(node.obj, torch.nn.Parameter), ref, apart.dtype, window, requires_grad, None, hooks, node.seen

    def look(self, node: Node, walk: Sender) -> Any:
        apart = walk.table.apart[id(node.obj)]
        hooks = gradient_hooks.encoded(node.obj, walk)
        state = _state(node, apart, hooks)
        known = node.seen
        same = known is not None and (known[:3], known[4]) == (state[:3], state[4])
        if not walk.reads or (same and not apart.changed):
            return None
        node.seen = state
        if walk.quiet:
            return NOTHING
        return state, walk.buffer(apart.later()), None, hooks, None

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        import torch

        seen, where, _, hooks, memory = state
        apart = receiver.table.apart[id(node.obj)]
        if (seen[0], seen[1]) != (apart.shape, apart.dtype):
            raise CannotTravel(
                f"a tensor of shape {apart.shape} and type {apart.dtype} became {seen[0]}, {seen[1]} in the notebook, "
                "and the ranks keep it in pieces. Start afresh with %distributed stop"
            )
        if where is not None:
            data = receiver.buffer(where)
            apart.arrived = torch.frombuffer(data, dtype=apart.dtype).view(apart.shape) if len(data) else None
        elif memory is not None:
            apart.arrived = shown(receiver.decode(memory[0]), apart.dtype, memory[1])
        if memory is not None:
            node.fixed = [receiver.node(memory[0].key)]
        if node.obj.is_leaf and node.obj.requires_grad != seen[2]:
            node.obj.requires_grad_(seen[2])
        if seen[4] != gradient_hooks.NONE or gradient_hooks.hooked(node.obj):
            gradient_hooks.install(node.obj, hooks, receiver)
        node.seen = seen


def _state(node: Node, apart: SplitTensor, hooks: gradient_hooks.Hooks | None) -> tuple[Any, ...]:
    """What `tensors.py` remembers of a tensor, without the checksum, which the receiver finds."""
    requires_grad = node.obj.requires_grad and node.obj.is_leaf
    return apart.shape, apart.dtype, requires_grad, None, gradient_hooks.keys_of(hooks)


PLACE: Kind = PlaceKind()
APART: Kind = SplitTensorKind()


def part(table: Nodes, apart: SplitTensor) -> None:
    """Note that a tensor's content is in pieces from here on, and release its memory."""
    table.apart[id(apart.tensor)] = apart
    node = table.find(apart.tensor)
    if node is None:
        return
    node.kind, node.memo = APART, None
    # One that the other side made without content gets all that is here.
    apart.changed = any(inner.kind is STORAGE and inner.obj.device.type == "meta" for inner in node.fixed or ())
    empty(table, node, apart)


def empty(table: Nodes, node: Node, apart: SplitTensor) -> None:
    """Release the memory that the other side's tensor shows."""
    storages = [inner for inner in node.fixed or () if inner.kind is STORAGE]
    for storage in storages:
        table.replace(storage, apart.place, PLACE)
        storage.fixed = []


def join(table: Nodes, tensor: torch.Tensor, kind: Kind) -> None:
    """Note that a tensor is an ordinary one again, and that it is unknown what the other side has."""
    table.apart.pop(id(tensor), None)
    node = table.find(tensor)
    if node is not None:
        node.kind, node.memo, node.seen = kind, None, None
