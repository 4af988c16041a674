"""Tells whether the notebook still has what it had sent: a digest of all of a name's content."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any

LARGE = 256 << 20
"""Bytes from which on nothing is read: such a name counts as changed. A model is read whole, a piece at a time."""
PIECE = 64 << 20


class _Digest:
    """Takes what pickle writes."""

    def __init__(self) -> None:
        self.of = hashlib.blake2b(digest_size=16)
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        if self.size > LARGE:
            raise OverflowError
        self.of.update(view)
        return view.nbytes


class _Pickler(pickle.Pickler):
    """Tensors by what they hold: torch writes where their memory is, too."""

    def reducer_override(self, value: Any) -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.nbytes > LARGE:
            raise OverflowError
        held = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str, (type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, held)


def digest(value: Any) -> str:
    """Empty where it cannot be told: then the value counts as changed."""
    torch: Any = sys.modules.get("torch")
    taken = _Digest()
    try:
        if torch is not None and isinstance(value, torch.nn.Module):
            value = _learned(value, taken)
        _Pickler(taken, protocol=4).dump(value)
    except Exception:  # a class of the user's may raise anything, and functions of the notebook's do not pickle
        return ""
    return taken.of.hexdigest()


def _learned(model: Any, taken: _Digest) -> list[Any]:
    """What a model is made of, and has learned. Whether it trains or evaluates is no work that could be lost."""
    found: list[Any] = [(name, type(part).__name__) for name, part in model.named_modules()]
    for name, value in model.state_dict().items():
        if not hasattr(value, "nbytes"):  # what a module of the user's adds
            found.append((name, value))
            continue
        found.append((name, str(value.dtype), tuple(value.shape)))
        held = value.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
        for at in range(0, len(held), PIECE):
            taken.of.update(memoryview(held[at : at + PIECE].cpu().numpy()))
    return found


def digests(namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    return {name: digest(namespace[name]) for name in names if name in namespace}
