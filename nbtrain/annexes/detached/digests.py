"""Tells whether the notebook still has what it had sent: a digest of all of a name's content."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

LARGE = 256 << 20
"""Bytes from which on nothing is read: such a name counts as changed."""


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


def digest(value: Any) -> str:
    """Empty where it cannot be told: then the value counts as changed."""
    taken = _Digest()
    try:
        pickle.Pickler(taken, protocol=4).dump(value)
    except Exception:  # a class of the user's may raise anything, and functions of the notebook's do not pickle
        return ""
    return taken.of.hexdigest()


def digests(namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    return {name: digest(namespace[name]) for name in names if name in namespace}
