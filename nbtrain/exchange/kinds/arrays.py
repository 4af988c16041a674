"""Moves NumPy arrays: views stay views, bytes travel beside the pickle, and a checksum tells whether they changed."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.exchange.kinds.base import NOTHING, Kind, MakeTwin, Node, Receiver, Sender
from nbtrain.exchange.kinds.checksum import array_checksum
from nbtrain.exchange.kinds.containers import same_items
from nbtrain.exchange.shared_memory import untouched


class ArrayKind(Kind):
    """An array that owns its memory, or a view of one that does."""

    name = "array"
    whole = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        array = node.obj
        owner = owner_of(array)
        if owner is not array:
            node.seen = _view(array, owner)
            return walk.encode(owner), node.seen, array.flags.writeable, None
        if walk.quiet:  # what its bytes are, a look remembers
            return None
        node.seen = _seen(array)
        if walk.arrays is not None:
            insort(walk.arrays, (array.ctypes.data, id(array), array))
        order = _order(array)
        where = walk.buffer(_bytes(array, order), node)
        return None, (array.dtype, array.shape, order, where), array.flags.writeable, node.seen

    def make(self, args: Any, receiver: Receiver) -> Any:
        import numpy as np

        owner, form, writeable, _ = args
        if owner is not None:
            dtype, shape, strides, offset = form
            array = np.ndarray(shape, dtype, memory_of(receiver.decode(owner)), offset, strides)
        else:
            dtype, shape, order, where = form
            array = np.ndarray(shape, dtype, receiver.buffer(where), order=order)
        if not writeable:
            array.flags.writeable = False
        return array

    def made(self, node: Node, args: Any, receiver: Receiver) -> None:
        owner, form, _, seen = args
        node.seen = form if owner is not None else seen
        node.fixed = [] if owner is None else [receiver.node(owner.key)]

    def look(self, node: Node, walk: Sender) -> Any:
        array, before = node.obj, node.seen
        if not walk.reads and before is not None:
            return None
        owner = owner_of(array)
        if owner is array and before is not None and _as_it_was(array, before):
            return None
        # Of a view's bytes its owner tells.
        seen = _seen(array) if owner is array else _view(array, owner)
        if seen == before:
            return None
        if owner is not array or (before is not None and seen[:2] != before[:2]):
            made = self.make_args(node, walk)
            return NOTHING if walk.quiet else MakeTwin(node.key, self.name, made, anew=True)
        node.seen = seen
        if walk.quiet:
            return NOTHING
        order = _order(array)
        return seen, order, walk.buffer(_bytes(array, order), node), array.flags.writeable

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        import numpy as np

        seen, order, where, writeable = state
        array = node.obj
        if _order(array) != order or not receiver.renew(where, array.ctypes.data):
            if not array.flags.writeable:
                array.flags.writeable = True
            array[...] = np.ndarray(seen[0], seen[1], receiver.buffer(where), order=order)
        if array.flags.writeable != writeable:
            array.flags.writeable = writeable
        node.seen = seen


class ObjectArrayKind(Kind):
    """An array of Python objects, or a view of one, which tells of what is in it."""

    name = "object array"

    def make_args(self, node: Node, walk: Sender) -> Any:
        array = node.obj
        owner = _shown(array)
        if owner is array:
            return None, array.shape
        node.seen = _view(array, owner)
        return walk.encode(owner), node.seen

    def make(self, args: Any, receiver: Receiver) -> Any:
        import numpy as np

        owner, form = args
        if owner is None:
            return np.empty(form, dtype=object)
        _, shape, strides, offset = form
        cells = receiver.decode(owner).reshape(-1, order="A")[offset // np.dtype(object).itemsize :]
        return np.lib.stride_tricks.as_strided(cells, shape, strides)

    def made(self, node: Node, args: Any, receiver: Receiver) -> None:
        owner, form = args
        if owner is not None:
            node.seen, node.fixed = form, [receiver.node(owner.key)]

    def look(self, node: Node, walk: Sender) -> Any:
        owner = _shown(node.obj)
        if owner is not node.obj:
            if node.seen == _view(node.obj, owner):
                return None
            made = self.make_args(node, walk)
            return NOTHING if walk.quiet else MakeTwin(node.key, self.name, made, anew=True)
        shape, items = node.obj.shape, list(node.obj.flat)
        if node.seen is not None and node.seen[0] == shape and same_items(items, node.seen[1]):
            return None
        node.seen = shape, items
        return shape, list(map(walk.encode, items))

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        shape, items = state
        if node.obj.shape != shape:
            node.obj.resize(shape, refcheck=False)
        node.obj.flat = [None] * len(items)
        for index, value in enumerate(items):
            node.obj.flat[index] = receiver.decode(value)
        node.seen = None


class MemmapKind(Kind):
    """`np.memmap` travels by its file's name: it may be larger than memory."""

    name = "memmap"
    whole = constant = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        array = node.obj
        if array.filename is None or type(array.base).__name__ != "mmap":
            raise CannotTravel("this view of a memory map has no file of its own; send the map and slice it there")
        if array.mode == "c":
            raise CannotTravel("what is written to a memory map of mode 'c' is not in its file; send numpy.array(it)")
        return str(array.filename), array.dtype, array.mode, array.offset, array.shape

    def make(self, args: Any, receiver: Receiver) -> Any:
        import numpy as np

        name, dtype, mode, offset, shape = args
        return np.memmap(name, dtype, "r+" if mode == "w+" else mode, offset, shape)


def _as_it_was(array: Any, before: tuple[Any, ...]) -> bool:
    """Whether nobody here has written to a large array's memory; a checksum would read all of it."""
    if (array.shape, array.dtype, array.flags.writeable) != (*before[:2], before[3]):
        return False
    return untouched(array.ctypes.data, array.nbytes)


def owner_of(array: Any) -> Any:
    """The array with contiguous memory, or the tensor, whose memory this array shows; else the array itself."""
    import numpy as np

    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    torch: Any = sys.modules.get("torch")
    if torch is not None and type(owner.base) is getattr(torch, "Tensor", None):
        return owner.base
    known = type(owner) in (np.ndarray, np.memmap) and not owner.dtype.hasobject
    return owner if known and (owner.flags.c_contiguous or owner.flags.f_contiguous) else array


def array_at(address: int, size: int, walk: Sender) -> Any:
    """The array with this memory, for a tensor of `torch.from_numpy`, which cannot be asked. It is among those that the
    other side has, or gets with this walk, or is a name of the notebook."""
    import numpy as np

    if walk.arrays is None:
        walk.arrays = []
        for value in [
            *(node.obj for node in walk.table.nodes.values() if node.kind is ARRAY),
            *walk.namespace.values(),
        ]:
            owner = owner_of(value) if type(value) is np.ndarray and value.size else None
            if type(owner) is np.ndarray and not owner.dtype.hasobject:
                insort(walk.arrays, (owner.ctypes.data, id(owner), owner))
    index = bisect_right(walk.arrays, (address, sys.maxsize)) - 1
    if index < 0:
        return None
    start, _, owner = walk.arrays[index]
    inside = owner.flags.writeable and address + size <= start + owner.nbytes and owner_of(owner) is owner
    return owner if inside and (owner.flags.c_contiguous or owner.flags.f_contiguous) else None


def _shown(array: Any) -> Any:
    """The array of objects that this one is a view of, or itself."""
    import numpy as np

    owner = array
    while type(owner.base) is np.ndarray and owner.base.dtype == object:
        owner = owner.base
    return owner if owner.flags.c_contiguous or owner.flags.f_contiguous else array


def _order(array: Any) -> Any:
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _seen(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array_checksum(array), array.flags.writeable


def _view(array: Any, owner: Any) -> tuple[Any, ...]:
    import numpy as np

    start = owner if isinstance(owner, np.ndarray) else memory_of(owner)
    offset = array.__array_interface__["data"][0] - start.__array_interface__["data"][0]
    return array.dtype, array.shape, array.strides, offset


def memory_of(owner: Any) -> Any:
    """All bytes of an array or of what a tensor shows."""
    import numpy as np

    if isinstance(owner, np.ndarray):
        return np.asarray(owner).reshape(-1, order=_order(owner)).view(np.uint8)
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(owner.untyped_storage()).numpy()


def _bytes(array: Any, order: str) -> memoryview:
    """The bytes of an array as they lie in memory."""
    import numpy as np

    flat = np.ascontiguousarray(array.T if order == "F" else array)
    return memoryview(flat.reshape(-1).view(np.uint8))


def kind_of(obj: Any) -> Kind | None:
    """The kind of an array with dense memory; None for others and for subclasses, which go by their own pickle."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(obj) is numpy.ndarray and (obj.dtype == object or not obj.dtype.hasobject):
        return OBJECTS if obj.dtype == object else ARRAY
    return MEMMAP if numpy is not None and type(obj) is numpy.memmap else None


def has_attributes(obj: Any) -> bool:
    """Whether this is an array of a subclass, whose pickle leaves out attributes that a program set on it."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(obj, numpy.ndarray) or type(obj).__reduce__ is not numpy.ndarray.__reduce__:
        return False
    return type(obj).__reduce_ex__ is numpy.ndarray.__reduce_ex__ and bool(getattr(obj, "__dict__", None))


def array_with_attributes(obj: Any) -> tuple[Any, ...]:
    """A `__reduce__` for such an array."""
    import numpy

    return _with_attributes, (type(obj), obj.view(numpy.ndarray), dict(vars(obj)))


def _with_attributes(cls: Any, data: Any, attributes: dict[str, Any]) -> Any:
    array = data.view(cls)
    array.__dict__.clear()  # what `__array_finalize__` has set
    array.__dict__.update(attributes)
    return array


ARRAY = ArrayKind()
MEMMAP = MemmapKind()
OBJECTS = ObjectArrayKind()
