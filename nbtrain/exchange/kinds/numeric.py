"""Arrays and tensors: the bytes travel beside the pickle, views stay views, content is judged by checksum."""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any

from nbtrain.errors import CannotTravel
from nbtrain.exchange.fingerprint import SMALL, array_checksum, checksum, raw
from nbtrain.exchange.kinds.base import ATOMS, NOTHING, Kind, Make

if TYPE_CHECKING:
    from nbtrain.exchange.residence import Arrival, Node, Walk


class Array(Kind):
    """A NumPy array that owns its memory, or a view of one that does."""

    name = "array"
    whole = True

    def shell(self, node: Node, walk: Walk) -> Any:
        array = node.obj
        owner = owner_of(array)
        if owner is not array:
            offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            ref = walk.encode(owner)
            return ref, array.dtype, array.shape, array.strides, offset, array.flags.writeable, None
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        node.seen = None if walk.quiet else self._seen(array)
        where = 0 if walk.quiet else walk.buffer(_bytes(array.T if order == "F" else array))
        return None, array.dtype, array.shape, order, where, array.flags.writeable, node.seen

    def make(self, args: Any, arrival: Arrival) -> Any:
        import numpy as np

        owner, dtype, shape, *rest = args
        if owner is not None:
            strides, offset, writeable, _ = rest
            base = arrival.decode(owner)
            memory = base.reshape(-1, order="A").view(np.uint8)
            array = np.ndarray(shape, dtype, memory, offset, strides)
        else:
            order, where, writeable, _ = rest
            array = np.ndarray(shape, dtype, arrival.buffer(where), order=order)
        if not writeable:
            array.flags.writeable = False
        return array

    def _seen(self, array: Any) -> tuple[Any, ...]:
        return array.shape, array.dtype, array_checksum(array)

    def made(self, node: Node, args: Any) -> None:
        node.seen = args[-1]

    def look(self, node: Node, walk: Walk) -> Any:
        array = node.obj
        if owner_of(array) is not array:
            return None  # its owner tells what changed
        if walk.quiet and node.seen is not None:
            return None
        before, seen = node.seen, self._seen(array)
        if seen == before:
            return None
        if before is not None and seen[:2] != before[:2] and not walk.quiet:
            return Make(node.key, self.name, self.shell(node, walk), anew=True)
        node.seen = seen
        return NOTHING if walk.quiet else (seen, walk.buffer(_bytes(array)))

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        import numpy as np

        seen, where = state
        array = node.obj
        writeable = array.flags.writeable
        array.flags.writeable = True
        array[...] = np.ndarray(seen[0], seen[1], arrival.buffer(where))
        array.flags.writeable = writeable
        node.seen = seen


class Memmap(Kind):
    """`np.memmap` travels by its file's name: it may be larger than memory."""

    name = "memmap"
    whole = constant = True

    def shell(self, node: Node, walk: Walk) -> Any:
        array = node.obj
        if array.filename is None or type(array.base).__name__ != "mmap":
            raise CannotTravel("this view of a memory map has no file of its own; send the map and slice it there")
        return str(array.filename), array.dtype, array.mode, array.offset, array.shape

    def make(self, args: Any, arrival: Arrival) -> Any:
        import numpy as np

        name, dtype, mode, offset, shape = args
        return np.memmap(name, dtype, "r+" if mode == "w+" else mode, offset, shape)

    def look(self, node: Node, walk: Walk) -> Any:
        return None


def owner_of(array: Any) -> Any:
    """The array whose memory this one shows, if that is an array with contiguous memory; else the array itself."""
    import numpy as np

    owner = array
    while type(owner.base) is np.ndarray:
        owner = owner.base
    if owner is array or not (owner.flags.c_contiguous or owner.flags.f_contiguous):
        return array
    return owner


def _bytes(array: Any) -> memoryview:
    import numpy as np

    flat = np.ascontiguousarray(array)
    return memoryview(flat.reshape(-1).view(np.uint8))


class Storage(Kind):
    """The memory that one or several tensors show. Sent once, with its bytes; later changes go by tensor."""

    name = "storage"
    whole = constant = True

    def identity(self, obj: Any) -> int:
        return int(obj._cdata)  # Python wraps the same storage anew each time it is asked for

    def shell(self, node: Node, walk: Walk) -> Any:
        import torch

        storage = node.obj
        device = storage.device.type
        if walk.quiet:
            return None
        if storage.nbytes() == 0 or device == "meta":
            return device, storage.nbytes(), None
        here = storage if device == "cpu" else storage.cpu()
        data = torch.empty(0, dtype=torch.uint8).set_(here)
        return device, storage.nbytes(), walk.buffer(memoryview(data.numpy()))

    def make(self, args: Any, arrival: Arrival) -> Any:
        import torch

        kind, size, where = args
        device = arrival.device(kind)
        if where is None:
            return torch.UntypedStorage(size, device=device)
        storage = torch.frombuffer(arrival.buffer(where), dtype=torch.uint8).untyped_storage()
        return storage if device == "cpu" else storage.to(device=device)

    def look(self, node: Node, walk: Walk) -> Any:
        return None


class Tensor(Kind):
    """A dense tensor or parameter. Autograd's graph and `.grad` stay where they are."""

    name = "tensor"
    whole = True

    def shell(self, node: Node, walk: Walk) -> Any:
        import torch

        tensor = node.obj
        storage = walk.encode(tensor.untyped_storage())
        if walk.quiet:
            return None
        extra = [(key, walk.encode(value)) for key, value in vars(tensor).items()] if vars(tensor) else None
        node.seen = self._seen(node)
        grown = tensor.requires_grad and tensor.is_leaf
        return (type(tensor) is torch.nn.Parameter, storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.size()),
                tensor.stride(), grown, (tensor.is_conj(), tensor.is_neg()), extra, node.seen)  # fmt: skip

    def make(self, args: Any, arrival: Arrival) -> Any:
        import torch

        is_parameter, storage, dtype, offset, size, stride, grown, (conj, neg), extra, _ = args
        memory = arrival.decode(storage)
        tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, size, stride)
        if conj:
            tensor = torch._conj(tensor)
        if neg:
            tensor = torch._neg_view(tensor)
        if is_parameter:
            tensor = torch.nn.Parameter(tensor, grown)
        elif grown:
            tensor.requires_grad_()
        for key, value in extra or ():
            setattr(tensor, key, arrival.decode(value))
        return tensor

    def _seen(self, node: Node) -> tuple[Any, ...]:
        tensor = node.obj
        address, memory = node.memo
        if address == tensor.data_ptr() and tensor.is_contiguous() and len(memory) == tensor.nbytes:
            number = zlib.crc32(memory)
        else:
            number = checksum(tensor)
            size = tensor.nbytes
            if 0 < size <= SMALL and tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj():
                node.memo = tensor.data_ptr(), raw(tensor.data_ptr(), size)
        return tensor.shape, tensor.dtype, tensor.requires_grad and tensor.is_leaf, number

    def made(self, node: Node, args: Any) -> None:
        node.seen = args[-1]

    def look(self, node: Node, walk: Walk) -> Any:
        if walk.quiet and node.seen is not None:
            return None
        seen = self._seen(node)
        if seen == node.seen:
            return None
        node.seen = seen
        if walk.quiet:
            return NOTHING
        return seen, walk.buffer(tensor_bytes(node.obj))

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        import torch

        (shape, dtype, grown, _), where = state
        tensor = node.obj
        data = arrival.buffer(where)
        new = torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
        with torch.no_grad():
            if tensor.shape == new.shape and tensor.dtype == dtype:
                tensor.copy_(new)  # not `.data.copy_`: a graph recorded before must notice
            else:
                tensor.data = new.to(tensor.device, copy=True)
        if tensor.is_leaf and tensor.requires_grad != grown:
            tensor.requires_grad_(grown)
        node.seen = state[0]


def tensor_bytes(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.reshape(-1).view(torch.uint8).numpy())


def tensor_by_value(tensor: Any) -> tuple[Any, ...]:
    """A `__reduce__` for a tensor that only an opaque object knows."""
    import numpy as np

    return _from_value, (np.frombuffer(tensor_bytes(tensor), np.uint8), tensor.dtype, tuple(tensor.shape))


def _from_value(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


ARRAY, MEMMAP, STORAGE, TENSOR = Array(), Memmap(), Storage(), Tensor()


def kind_of(obj: Any) -> Kind | None:
    """The kind of an array or tensor that is dense memory; others go by their own pickle."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn"):
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            return TENSOR if obj.layout is torch.strided and not obj.is_quantized else None
        if type(obj) is torch.UntypedStorage:
            return STORAGE
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and type(obj) is numpy.ndarray and not obj.dtype.hasobject:
        return ARRAY
    if numpy is not None and type(obj) is numpy.memmap:
        return MEMMAP
    return None


def learn_atoms() -> None:
    """Types of torch and numpy whose objects nobody can change, once those are imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn"):
        ATOMS.update((torch.dtype, torch.device, torch.layout, torch.memory_format))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "generic"):
        ATOMS.update(t for t in vars(numpy).values() if isinstance(t, type) and issubclass(t, numpy.generic))
