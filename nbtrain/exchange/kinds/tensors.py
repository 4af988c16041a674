"""Moves tensors and parameters: what shares memory goes on sharing it, and a checksum tells whether content changed."""

from __future__ import annotations

import contextlib
import sys
import weakref
import zlib
from collections.abc import Iterable
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.compat import tensors
from nbtrain.exchange.kinds import gradient_hooks
from nbtrain.exchange.kinds.arrays import array_at, memory_of
from nbtrain.exchange.kinds.base import NOTHING, Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.bulk_compare import MemoryForm, form_of, window_of
from nbtrain.exchange.kinds.checksum import SMALL, checksum
from nbtrain.exchange.shared_memory import untouched

EMPTY = "empty"
"""Stands in place of a buffer for a tensor on the device "meta"."""


class MemoryPlace:
    """Stands for memory that the other side's tensors show, and that this side keeps in pieces (`split_tensors.py`)."""

    def __init__(self, of: Any) -> None:
        self.of = of


class StorageKind(Kind):
    """The memory that one or several tensors show. Sent once, with its bytes; later changes go by tensor."""

    name = "storage"
    whole = constant = True

    def identity(self, obj: Any) -> int:
        return tensors.memory_id(obj)

    def make_args(self, node: Node, walk: Sender) -> Any:
        if walk.quiet:
            return None
        storage = node.obj
        device, size = storage.device.type, storage.nbytes()
        if size == 0 or device == "meta":
            return device, size, None
        if device == "cpu" and not storage.resizable():  # somebody else's memory
            array = array_at(storage.data_ptr(), size, walk)
            if array is not None:
                return "array", size, (walk.encode(array), storage.data_ptr() - array.ctypes.data)
        return device, size, walk.buffer(_bytes(storage), node)

    def make(self, args: Any, receiver: Receiver) -> Any:
        import torch

        kind, size, where = args
        if kind == "array":
            return torch.from_numpy(memory_of(receiver.decode(where[0]))[where[1] : where[1] + size]).untyped_storage()
        device = receiver.device(kind)
        if where is None:
            return torch.UntypedStorage(size, device=device)
        storage = torch.frombuffer(receiver.buffer(where), dtype=torch.uint8).untyped_storage()
        return storage if device == "cpu" else storage.to(device=device)

    def made(self, node: Node, args: Any, receiver: Receiver) -> None:
        node.fixed = [receiver.node(args[2][0].key)] if args[0] == "array" else []


class TensorKind(Kind):
    """A dense tensor or parameter. Autograd's graph and `.grad` stay where they are."""

    name = "tensor"
    whole = leaf = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        import torch

        tensor = node.obj
        ref = walk.encode(tensor.untyped_storage())
        storage = walk.children[-1] if walk.children else None
        notes = walk.encode(vars(tensor)) if _noted(tensor) else None
        hooks = gradient_hooks.encoded(tensor, walk)
        if walk.quiet or storage is None:
            return None
        seen = _state_of(tensor, hooks, walk)
        # Memory that the other side knows already may have been written since: then a look sends the content too.
        node.seen = seen if walk.is_new(storage) else None
        node.memo = MemoryForm(tensor)
        requires_grad = tensor.requires_grad and tensors.is_leaf(tensor)
        is_parameter, window = type(tensor) is torch.nn.Parameter, window_of(tensor)
        return is_parameter, ref, tensor.dtype, window, requires_grad, notes, hooks, seen

    def make(self, args: Any, receiver: Receiver) -> Any:
        import torch

        is_parameter, storage, dtype, window, requires_grad, notes, hooks, _ = args
        tensor = shown(receiver.decode(storage), dtype, window)
        if is_parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad)
        elif requires_grad:
            tensor.requires_grad_()
        if notes is not None:
            tensor.__dict__ = receiver.decode(notes)
        if hooks is not None:
            gradient_hooks.install(tensor, hooks, receiver)
        return tensor

    def made(self, node: Node, args: Any, receiver: Receiver) -> None:
        node.seen = args[-1] and _complete(node.obj, args[-1])
        node.memo = MemoryForm(node.obj)
        if receiver.node(args[1].key).kind is not STORAGE:
            node.memo.window = args[3]  # the other side's
        if args[-2] is None and args[-3] is None:
            node.fixed = [receiver.node(args[1].key)]

    def look(self, node: Node, walk: Sender) -> Any:
        if not walk.reads and (node.seen is not None or _filled(node)):
            return None
        tensor = node.obj
        # What a program notes on a tensor (`p.decay = False`) stands in a dict that both sides know once there is one.
        notes = vars(tensor)
        noted = _noted(tensor) and not any(child.obj is notes for child in (*node.children, *(node.fixed or ())))
        hooks = gradient_hooks.encoded(tensor, walk)
        moved = _moved(node)
        if not noted and not moved and node.seen is not None and _as_it_was(tensor, node.seen, hooks):
            return None
        before, left = node.seen, _left(node) if moved and walk.keep_home and not walk.quiet else None
        seen = self._seen(node, hooks, walk)
        if seen == before and not noted and not moved:
            return None
        reshaped = before is not None and seen[:2] != before[:2]
        node.seen = seen
        ref = walk.encode(notes) if _noted(tensor) else None
        old = left and (left[0], left[1].dtype, window_of(left[1]), walk.buffer(tensor_bytes(left[1])))
        # Who has it in another shape is not to find a form of its own for the bytes.
        laid = before is None and not tensor.is_contiguous()
        memory = self._memory(node, walk) if moved or reshaped or laid else None
        if walk.quiet:
            return NOTHING
        where: Any = None
        if memory is not None and walk.is_new(memory):  # its bytes go with it
            pass
        elif tensor.device.type == "meta":
            where = EMPTY if memory is None else None
        else:
            where = walk.buffer(tensor_bytes(tensor), _storage_of(node) if _covers(tensor) else None)
        return seen, where, ref, hooks, memory and (memory.ref, window_of(tensor), old)

    def _memory(self, node: Node, walk: Sender) -> Node | None:
        """The memory that a tensor shows once it was given another one, or another part of it. Views of the old
        one no longer see what becomes of the tensor."""
        walk.encode(node.obj.untyped_storage())
        storage = walk.children[-1] if walk.children else None
        if storage is None or storage.kind is not STORAGE:
            return None
        node.fixed = [storage, *(node.fixed or ())[1:]]
        return storage

    def _seen(self, node: Node, hooks: gradient_hooks.Hooks | None, walk: Sender) -> tuple[Any, ...]:
        tensor = node.obj
        if node.memo is None or node.memo.form != form_of(tensor):
            node.memo = MemoryForm(tensor)
        small = 0 < tensor.nbytes <= SMALL and tensor.device.type == "cpu" and tensor.is_contiguous()
        if small and node.memo.flat is None and not tensor.is_conj() and not tensor.is_neg():
            node.memo.flatten(tensor)
        return _state_of(tensor, hooks, walk)

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        import torch

        seen, where, notes, hooks, memory = state
        shape, dtype, requires_grad, _, hooked = seen
        tensor = node.obj
        only_bytes = notes is memory is None and hooked == gradient_hooks.NONE and type(where) is int
        if only_bytes and _put_bytes(node, seen, where, receiver):
            return
        if memory is not None:
            ref, window, left = memory
            if left is not None and left[0] in receiver.table.nodes:
                key, kind, showed, old = left
                shown(receiver.twin(key), kind, showed).copy_(_content(receiver.buffer(old), kind, showed[1]))
            if _fits(receiver.decode(ref), dtype, window):
                _show(tensor, shown(receiver.decode(ref), dtype, window))
                node.fixed = [receiver.node(ref.key), *(node.fixed or ())[1:]]
        same = tensor.shape == shape and tensor.dtype == dtype
        if where == EMPTY:
            _show(tensor, torch.empty(shape, dtype=dtype, device="meta"))
        elif where is None or (same and _covers(tensor) and receiver.renew(where, tensor.data_ptr())):
            _count_as_written(tensor)
        else:
            _write(tensor, _content(receiver.buffer(where), dtype, shape), same)
        if tensor.requires_grad != requires_grad and tensors.is_leaf(tensor):
            tensor.requires_grad_(requires_grad)
        if notes is not None and (own := receiver.decode(notes)) is not vars(tensor):
            tensor.__dict__ = own
        if hooked != gradient_hooks.NONE or gradient_hooks.hooked(tensor):
            gradient_hooks.install(tensor, hooks, receiver)
        node.seen = _complete(tensor, seen)
        if node.memo is None or node.memo.form != form_of(tensor):
            node.memo = MemoryForm(tensor)
        if memory is not None and node.fixed and node.fixed[0].kind is not STORAGE:
            node.memo.window = window


# --- small tensors of which only the bytes have changed -----------------------------------------------
# A model and its optimizer have a thousand of them, and one call of torch takes longer than all their bytes.


def look_at_bytes(node: Node, walk: Sender) -> Any:
    """`look` at a small tensor that lies where it lay (`node.memo`), without hooks and attributes."""
    data = node.memo.memory
    (*_, requires_grad, (_, _, leaf), _), number = node.memo.form, zlib.crc32(data)
    requires_grad = requires_grad and leaf
    if (requires_grad, number) == node.seen[2:4]:
        return None
    node.seen = (*node.seen[:2], requires_grad, number, gradient_hooks.NONE)
    return node.seen, walk.buffer(data), None, None, None


def _put_bytes(node: Node, seen: tuple[Any, ...], where: int, receiver: Receiver) -> bool:
    """`put` into such a tensor. False: it is not one here."""
    if node.memo is None or node.seen is None or seen[:3] != node.seen[:3] or seen[3] is None or has_hooks(node):
        return False
    here: memoryview | None = node.memo.bytes_of(node.obj)
    if here is None:
        return False
    here[:] = receiver.written[node.key] = receiver.buffer(where)
    _count_as_written(node.obj)
    node.seen = seen
    return True


def has_hooks(node: Node) -> bool:
    """Whether the user's program has hung hooks on a tensor's gradient, or had when it was seen."""
    if node.seen[4] != gradient_hooks.NONE:
        return True
    return node.memo.form[-1] is not None and gradient_hooks.by_user(node.obj)


def shown(memory: Any, dtype: Any, window: tuple[Any, ...]) -> Any:
    import torch

    offset, size, stride, conj, neg = window
    if type(memory) is MemoryPlace:  # its content follows
        return torch.empty(size, dtype=dtype, device=memory.of.tensor.device)
    tensor = torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, size, stride)
    if conj:
        tensor = tensors.conjugate_view(tensor)
    return tensors.negative_view(tensor) if neg else tensor


def _fits(memory: Any, dtype: Any, window: tuple[Any, ...]) -> bool:
    """Whether this memory is large enough: the other side's may have been resized."""
    if type(memory) is MemoryPlace:
        return True
    offset, size, stride, *_ = window
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    return 0 in size or bool((last + 1) * dtype.itemsize <= memory.nbytes())


def _left(node: Node) -> tuple[int, Any] | None:
    """What a tensor showed before it got other memory, if that was written to: the other side may still show it."""
    memory = node.fixed[0] if node.fixed else None
    if memory is None or memory.obj is None or node.memo is None or node.seen is None or _filled(node):
        return None
    (address, _, _, dtype, *_), window = node.memo.form, node.memo.window
    if address != memory.obj.data_ptr() + window[0] * dtype.itemsize or not _fits(memory.obj, dtype, window):
        return None
    old = shown(memory.obj, dtype, window)
    return None if checksum(old) == node.seen[3] else (memory.key, old)


def _moved(node: Node) -> bool:
    """Whether a tensor shows other memory than both sides know, or another part of it: after `x.data = …`, `x.t_()`,
    `x.set_(…)`. On another device each side has memory of its own."""
    memory = node.fixed[0] if node.fixed else None
    if memory is None or memory.kind is not STORAGE:
        return False
    now = node.obj.untyped_storage()
    if memory.obj is None or _filled(node):  # dropped, because the other side shows it no longer
        return True
    if now.device != memory.obj.device:
        return False
    return bool(tensors.memory_id(now) != tensors.memory_id(memory.obj)) or _shifted(node)


def _shifted(node: Node) -> bool:
    return node.memo is None or node.memo.window != window_of(node.obj)


def _filled(node: Node) -> bool:
    """Whether a tensor without content, as both sides know it, has been given some."""
    memory = node.fixed[0] if node.fixed else None
    if memory is None or memory.kind is not STORAGE or memory.obj is None:
        return False
    return bool(memory.obj.device.type == "meta" != node.obj.device.type)


def _noted(tensor: Any) -> bool:
    """Whether a program has set attributes on it; what torch's compiler notes is each side's own."""
    return any(not name.startswith(tensors.COMPILER_NOTES) for name in vars(tensor))


def _state_of(tensor: Any, hooks: gradient_hooks.Hooks | None, walk: Sender) -> tuple[Any, ...]:
    requires_grad = tensor.requires_grad and tensors.is_leaf(tensor)
    number = walk.checksums.get(id(tensor))
    number = checksum(tensor) if number is None else number
    return tuple(tensor.shape), tensor.dtype, requires_grad, number, gradient_hooks.keys_of(hooks)


def _complete(tensor: Any, seen: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add the checksum that a sender does not know which has the tensor in pieces."""
    return seen if seen[3] is not None else (*seen[:3], checksum(tensor), *seen[4:])


def _as_it_was(tensor: Any, before: tuple[Any, ...], hooks: gradient_hooks.Hooks | None) -> bool:
    """Whether nobody here has written to a large tensor's memory; a checksum would read all of it."""
    if tensor.nbytes < SMALL or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    if (tuple(tensor.shape), tensor.dtype, tensor.requires_grad and tensors.is_leaf(tensor)) != before[:3]:
        return False
    if gradient_hooks.keys_of(hooks) != before[4]:
        return False
    return untouched(tensor.data_ptr(), tensor.nbytes)


def _content(data: memoryview, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _write(tensor: Any, new: Any, same: bool) -> None:
    import torch

    if tensor.device.type == "meta":
        _show(tensor, new.clone())
        return
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext(), torch.no_grad():
        if not same:
            tensor.data = new.to(tensor.device, copy=True)
            return
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:  # expanded: one place in memory is many elements
                tensor, new = tensor.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
        tensor.copy_(new)  # not `.data.copy_`: a graph recorded before must notice


def _show(tensor: Any, new: Any) -> None:
    """Give a tensor other memory. To or from the device "meta", `.data = …` cannot do it."""
    import torch

    if (tensor.device.type == "meta") == (new.device.type == "meta"):
        tensor.data = new
        return
    new = torch.nn.Parameter(new, tensor.requires_grad) if type(tensor) is torch.nn.Parameter else new
    if not swapped(tensor, new):
        raise CannotTravel(
            f"a tensor of shape {tuple(tensor.shape)} that was made without content cannot be given any, because a "
            "graph or a view of torch's refers to it. Make the model anew, and use it on the ranks only"
        )


def swapped(tensor: Any, new: Any) -> bool:
    """Give one tensor the memory of another of its class, on whatever device; its attributes stay. False: something of
    torch's own refers to it. Hooks on its gradient are gone."""
    import torch

    new.__dict__.update(vars(tensor))
    if weakref.getweakrefs(tensor):  # recurrent layers have some: what they mean is the object, which stays
        if tensors.has_other_owners(tensor):
            return False
        tensors.swap_memory(tensor, new)
        return True
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError:
        return False
    return True


def _count_as_written(tensor: Any) -> None:
    """Let a graph that was recorded before notice the change."""
    import torch

    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def moved(nodes: Iterable[Node]) -> list[int]:
    """Addresses of memory that tensors were made with and no longer show."""
    return [
        memory.obj.data_ptr()
        for node in nodes
        if node.kind is TENSOR
        for memory in node.fixed or ()
        if memory.kind is STORAGE
        and memory.obj is not None
        and memory.obj.data_ptr() != node.obj.untyped_storage().data_ptr()
    ]


def _covers(tensor: Any) -> bool:
    """Whether a tensor shows all of its memory, in order."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    return bool(tensor.nbytes == tensor.untyped_storage().nbytes())


def _storage_of(node: Node) -> Node | None:
    """The node of the memory that a tensor shows now."""
    storage = node.fixed[0] if node.fixed else None
    if storage is None or storage.kind is not STORAGE or storage.fixed:  # memory of an array, which tells of it
        return None
    return storage if storage.obj.data_ptr() == node.obj.data_ptr() else None


def _bytes(storage: Any) -> memoryview:
    import torch

    return memoryview(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy())


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
    return _content(memoryview(bytearray(data)), dtype, shape)


def kind_of(obj: Any) -> Kind | None:
    """The kind of a tensor with dense memory; None for others and for subclasses, which go by their own pickle."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return None
    if type(obj) is torch.Tensor or type(obj) is torch.nn.Parameter:
        dense = obj.layout is torch.strided and not (obj.is_quantized or obj.is_nested or is_far(obj))
        return TENSOR if dense else None
    return STORAGE if type(obj) is torch.UntypedStorage else None


def is_far(obj: Any) -> bool:
    """Whether a tensor is on an XLA device, which has no memory to show and which the other side must not touch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor) and obj.device.type == "xla"


STORAGE, TENSOR = StorageKind(), TensorKind()
