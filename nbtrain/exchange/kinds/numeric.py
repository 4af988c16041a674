"""Which arrays and tensors are dense memory; the others go by their own pickle."""

from __future__ import annotations

import sys
from typing import Any

from nbtrain.exchange.kinds.arrays import ARRAY, MEMMAP, OBJECTS
from nbtrain.exchange.kinds.base import ATOMS, Kind
from nbtrain.exchange.kinds.tensors import STORAGE, TENSOR, tensor_by_value


def kind_of(obj: Any) -> Kind | None:
    cls = type(obj)
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn"):
        if cls is torch.Tensor or cls is torch.nn.Parameter:
            dense = obj.layout is torch.strided and not (obj.is_quantized or obj.is_nested or is_far(obj))
            return TENSOR if dense else None
        if cls is torch.UntypedStorage:
            return STORAGE
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and cls is numpy.ndarray and (obj.dtype == object or not obj.dtype.hasobject):
        return OBJECTS if obj.dtype == object else ARRAY
    if numpy is not None and cls is numpy.memmap:
        return MEMMAP
    return None


def has_attributes(obj: Any) -> bool:
    """An array of a class below numpy's own, whose pickle leaves out what a program noted on it."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(obj, numpy.ndarray) or type(obj).__reduce__ is not numpy.ndarray.__reduce__:
        return False
    return type(obj).__reduce_ex__ is numpy.ndarray.__reduce_ex__ and bool(getattr(obj, "__dict__", None))


def array_with_attributes(obj: Any) -> tuple[Any, ...]:
    """A `__reduce__` for one."""
    import numpy

    return _with_attributes, (type(obj), obj.view(numpy.ndarray), dict(vars(obj)))


def _with_attributes(cls: Any, data: Any, held: dict[str, Any]) -> Any:
    array = data.view(cls)
    array.__dict__.clear()  # what `__array_finalize__` has set
    array.__dict__.update(held)
    return array


def is_far(obj: Any) -> bool:
    """A tensor on an XLA device: it has no memory that could be shown, and the other side must not touch the device."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor) and obj.device.type == "xla"


def learn_atoms() -> None:
    """Types of torch and numpy whose objects nobody can change, once those are imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn") and torch.dtype not in ATOMS:
        ATOMS.update((torch.dtype, torch.device, torch.layout, torch.memory_format))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "generic") and numpy.generic not in ATOMS:
        ATOMS.update(t for t in vars(numpy).values() if isinstance(t, type) and issubclass(t, numpy.generic))


__all__ = ["ARRAY", "MEMMAP", "OBJECTS", "STORAGE", "TENSOR", "is_far", "kind_of", "learn_atoms", "tensor_by_value"]
