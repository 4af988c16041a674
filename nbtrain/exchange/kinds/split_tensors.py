"""Moves tensors whose content this side keeps in pieces, or otherwise than the other side has it.

The other side has an ordinary tensor and never hears of it. Here the tensor only says the shape; `ObjectTable.apart`
knows whether its content has changed, and how all of it is had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from nbtrain.base.errors import CannotTravel
from nbtrain.compat.tensors import as_plain_tensors
from nbtrain.exchange.kinds import gradient_hooks
from nbtrain.exchange.kinds.base import NOTHING, Kind, Later, Node, Nodes, Receiver, Sender
from nbtrain.exchange.kinds.bulk_compare import window_of
from nbtrain.exchange.kinds.tensors import STORAGE, TENSOR, MemoryPlace, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


Form = tuple[Any, Any, int]
"""size, strides and offset of a part of a whole that lies in order"""
Place = tuple[Any, Form | None]
"""a tensor in pieces, and the part that is shown of it; None: all of it"""


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
        self.window = whole_window(self.shape)
        """which part of its memory the other side's shows"""
        self._fetch = fetch

    @property
    def kind(self) -> Kind:
        return APART

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def later(self) -> Later:
        return Later(self.nbytes, lambda: self._fetch(self), self)


class Alias:
    """A tensor that on the other side shows the memory of one in pieces: that one brings its content."""

    def __init__(self, tensor: torch.Tensor, place: MemoryPlace, window: tuple[Any, ...]) -> None:
        self.tensor, self.place, self.window = tensor, place, window

    @property
    def kind(self) -> Kind:
        return ALIAS


def whole_window(shape: tuple[int, ...], offset: int = 0) -> tuple[Any, ...]:
    """The window of an ordinary tensor that shows all of its memory."""
    import torch

    return offset, tuple(shape), torch.empty(shape, device="meta").stride(), False, False


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
        node.seen = seen = _state(node, apart, hooks)
        return isinstance(node.obj, torch.nn.Parameter), ref, apart.dtype, apart.window, seen[2], None, hooks, seen

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
            node.fixed, apart.window = [receiver.node(memory[0].key)], memory[1]
        if node.obj.is_leaf and node.obj.requires_grad != seen[2]:
            node.obj.requires_grad_(seen[2])
        if seen[4] != gradient_hooks.NONE or gradient_hooks.hooked(node.obj):
            gradient_hooks.install(node.obj, hooks, receiver)
        node.seen = seen


def blank_alias(of: torch.Tensor, form: Form | None) -> torch.Tensor:
    """One that shows this part of a tensor, with one number in memory."""
    import torch

    return torch.zeros((), dtype=of.dtype, device=of.device).expand(of.shape if form is None else form[0])


def is_blank(tensor: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage().nbytes() < tensor.nbytes)


class AliasKind(Kind):
    """The kind of an `Alias`; the other side makes a view."""

    name = "view"
    sent_as = "tensor"
    whole = leaf = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        alias = walk.table.apart[id(node.obj)]
        ref = walk.encode(alias.place)
        node.seen = tuple(node.obj.shape), node.obj.dtype, False, None, gradient_hooks.NONE
        # No content has been seen: where it is used again, the other side sends what it shows by then.
        return False, ref, node.obj.dtype, alias.window, False, None, None, None

    def look(self, node: Node, walk: Sender) -> Any:
        return None

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        """An ordinary tensor, with the numbers that came, until a cell begins that has the other in pieces."""
        import torch

        window, tensor = receiver.table.apart.pop(id(node.obj)).window, node.obj
        if is_blank(tensor):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        node.kind = TENSOR
        TENSOR.put(node, state, receiver)
        if state[-1] is None:
            node.memo.window = window


def _state(node: Node, apart: SplitTensor, hooks: gradient_hooks.Hooks | None) -> tuple[Any, ...]:
    """What `tensors.py` remembers of a tensor, without the checksum, which the receiver finds."""
    requires_grad = node.obj.requires_grad and node.obj.is_leaf
    return apart.shape, apart.dtype, requires_grad, None, gradient_hooks.keys_of(hooks)


PLACE: Kind = PlaceKind()
APART: Kind = SplitTensorKind()
ALIAS: Kind = AliasKind()


def part(table: Nodes, apart: SplitTensor) -> None:
    """Note that a tensor's content is in pieces from here on, and release its memory."""
    before = table.apart.get(id(apart.tensor))
    table.apart[id(apart.tensor)] = apart
    node = table.find(apart.tensor)
    if node is None:
        return
    apart.window = home_window(node, before) or apart.window
    node.kind, node.memo = APART, None
    # One that the other side made without content gets all that is here.
    apart.changed = any(inner.kind is STORAGE and inner.obj.device.type == "meta" for inner in node.fixed or ())
    settle(table, node, apart)


def home_window(node: Node | None, apart: Any) -> tuple[Any, ...] | None:
    """Which part of its memory the other side's tensor shows. `apart`: what is known of it in pieces. None: nothing is
    known, so that it has memory of its own."""
    window: tuple[Any, ...] | None = None
    if isinstance(apart, SplitTensor):
        window = apart.window
    elif node is not None and node.memo is not None:
        window = node.memo.window
    return window


def settle(table: Nodes, node: Node, apart: SplitTensor) -> None:
    """Release the memory that the other side's tensor shows; what else shows it there is an alias here."""
    memory = node.fixed[0] if node.fixed else None
    if memory is not None and memory.kind is STORAGE:
        table.replace(memory, apart.place, PLACE)
        memory.fixed = []
    elif memory is not None and memory.kind is PLACE:  # of before it was set up anew
        apart.place = memory.obj
        apart.place.of = apart


def join(table: Nodes, tensor: torch.Tensor, kind: Kind) -> None:
    """Note that a tensor is an ordinary one again, and that it is unknown what the other side has."""
    table.apart.pop(id(tensor), None)
    node = table.find(tensor)
    if node is not None:
        node.kind, node.memo, node.seen = kind, None, None


def note_aliases(table: Nodes, changed: Iterable[Node]) -> list[tuple[Node, list[tuple[Node, SplitTensor]]]]:
    """Before a cell, of which these nodes are new or changed: each alias, and those in pieces of which it shows some
    numbers. In the same order on all ranks."""
    for node in changed:  # one that was given other memory
        if node.kind is APART:
            settle(table, node, table.apart[id(node.obj)])
    nodes = table.nodes.values()
    found = [n for n in nodes if n.fixed and n.fixed[0].kind is PLACE and n.kind is not APART]
    if not found:
        return []
    of_place: dict[int, list[tuple[Node, SplitTensor]]] = {}
    for node in nodes:
        if node.kind is APART and node.fixed:
            of_place.setdefault(node.fixed[0].key, []).append((node, table.apart[id(node.obj)]))
    pairs = []
    for node in sorted(found, key=lambda node: node.key):
        place: Node = node.fixed[0]  # type: ignore[index]  # see above
        window = table.apart[id(node.obj)].window if node.kind is ALIAS else _window_of(node)
        held = [(w, apart) for w, apart in of_place.get(place.key, ()) if overlap(window, apart.window)]
        if not held and not (node.kind is ALIAS and is_blank(node.obj)):
            no_alias(table, node)  # what it showed is no more, or is elsewhere
            continue
        table.apart[id(node.obj)] = Alias(node.obj, place.obj, window)
        node.kind, node.memo = ALIAS, None
        pairs.append((node, held))
    return pairs


def no_alias(table: Nodes, node: Node) -> None:
    """It is a tensor by itself here."""
    if node.kind is ALIAS:
        del table.apart[id(node.obj)]
        node.kind = TENSOR


def _window_of(node: Node) -> tuple[Any, ...]:
    with as_plain_tensors():  # what stands for a state refuses to be asked
        window: tuple[Any, ...] = window_of(node.obj) if node.memo is None else node.memo.window
    return window


def overlap(window: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (first, last), (start, end) = _ends(window), _ends(other)
    return first <= end and start <= last


def _ends(window: tuple[Any, ...]) -> tuple[int, int]:
    offset, size, stride, *_ = window
    if 0 in size:
        return offset, offset - 1
    return offset, offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def form_in(alias: Alias, apart: SplitTensor) -> Form | Literal[False] | None:
    """How an alias shows this tensor: size, strides and offset of a part; None: all of it. False: not only it."""
    if alias.window == apart.window:
        return None
    offset, size, stride, *bits = alias.window
    start, shape, own, *others = apart.window
    if bits != others:
        return False
    return _laid((size, stride, offset - start), shape, own, whole_window(shape)[2]) or False


def window_in(apart: tuple[Any, ...], form: Form | None) -> tuple[Any, ...] | None:
    """The other way round: the window of a part of the tensor that has this one. None: it cannot be told."""
    if form is None:
        return apart
    start, shape, own, *bits = apart
    if (laid := _laid(form, shape, whole_window(shape)[2], own)) is None:
        return None
    size, stride, offset = laid
    return start + offset, size, stride, *bits


def _laid(form: Form, shape: tuple[int, ...], strides: tuple[int, ...], others: tuple[int, ...]) -> Form | None:
    """A part of a tensor that lies by these strides, as it lies by others. None: it is no part, or not in these steps,
    as the rows of a transposed weight, one after the other."""
    size, steps, offset = form
    if strides == others:
        inside = offset >= 0 and _ends((offset, size, steps))[1] <= _ends((0, shape, strides))[1]
        return form if inside else None
    dims = sorted((dim for dim, count in enumerate(shape) if count > 1), key=lambda dim: -strides[dim])

    def at(place: int) -> list[int] | None:
        """The index of what lies there."""
        index = [0] * len(shape)
        for dim in dims:
            index[dim], place = divmod(place, strides[dim] or 1)
        return None if place else index

    start = at(offset)
    # A step that is never taken (size 1) may be any.
    each = [one for n, step in zip(size, steps, strict=True) if (one := at(step) or (at(0) if n == 1 else None))]
    if start is None or len(each) < len(size) or 0 in size:
        return None
    for dim, count in enumerate(shape):
        if start[dim] < 0 or start[dim] + sum((n - 1) * one[dim] for n, one in zip(size, each, strict=True)) >= count:
            return None

    def place(index: list[int]) -> int:
        return sum(number * step for number, step in zip(index, others, strict=True))

    return tuple(size), tuple(map(place, each)), place(start)
