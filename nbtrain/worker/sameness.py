"""A number per name, so that the notebook can tell which of them differ between ranks.

Models, optimizers and loaders are left out: what a strategy keeps equal is compared in `training.agreement`. Of a long
list its length and both its ends are looked at, of a large tensor only its shape: this runs after every cell.
"""

from __future__ import annotations

import collections
import sys
import types
import zlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from nbtrain.exchange.fingerprint import checksum
from nbtrain.exchange.kinds import ATOMS

ITEMS = 1000
"""Looked at below one name."""
DEEP = 100
"""Levels."""
LARGE = 1 << 20
"""Bytes up to which tensors, arrays and strings are read."""
LISTS = (list, tuple, collections.deque)
SETS = (set, frozenset)
DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def number(value: Any, passed_by: Iterable[int] = ()) -> int:
    """`passed_by`: ids of objects that stay here, each rank's own."""
    return _Look(passed_by).at(value)


class _Look:
    def __init__(self, passed_by: Iterable[int]) -> None:
        self.left = ITEMS
        self.depth = 0
        self.seen: dict[int, int] = dict.fromkeys(passed_by, 0)
        """id → number: objects that are one here may be two equal ones elsewhere"""

    def at(self, value: Any) -> int:
        self.left -= 1
        if id(value) in self.seen or self.depth >= DEEP:
            return self.seen.get(id(value), 0)
        self.seen[id(value)] = 0  # met again below itself
        self.depth += 1
        try:
            found = self._look(value)
        except Exception:  # a nested tensor has no shape; a class may hide its attributes
            found = 0
        self.depth -= 1
        self.seen[id(value)] = found
        return found

    def _look(self, value: Any) -> int:
        cls: Any = type(value)
        if cls in ATOMS:
            return _atom(value)
        if cls in LISTS:
            return self._all(cls, len(value), map(self.at, self._ends(value)))
        if cls in SETS:
            return self._all(cls, len(value), [sum(map(self.at, value))] if len(value) < self.left else [])
        if cls in DICTS:
            return self._all(cls, len(value), (self.at(part) for pair in self._ends(value.items()) for part in pair))
        if cls.__module__ == "__main__" and not _learns(cls):
            try:
                held = object.__getattribute__(value, "__dict__")
            except AttributeError:
                return self._memory(value)
            return self.at(held)
        return self._memory(value)

    def _ends(self, items: Any) -> Iterable[Any]:
        if self.left <= 0:
            return ()
        if len(items) <= self.left:
            return items
        half = self.left // 2
        last = reversed(list(islice(reversed(items), half)))
        return [*islice(items, half), *last]

    @staticmethod
    def _all(cls: type, size: int, numbers: Iterable[int]) -> int:
        return zlib.crc32(repr((cls.__name__, size, *numbers)).encode())

    @staticmethod
    def _memory(value: Any) -> int:
        torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and type(value) is torch.Tensor:
            shape = f"{value.dtype}{tuple(value.shape)}"
            small = value.numel() * value.element_size() <= LARGE
            return zlib.crc32(f"{shape}{checksum(value) if small else 0}".encode())
        if np is not None and type(value) is np.ndarray:
            shape = f"{value.dtype}{value.shape}"
            small = value.nbytes <= LARGE and not value.dtype.hasobject
            return zlib.crc32(value.tobytes() if small else b"", zlib.crc32(shape.encode()))
        return 0


def _atom(value: Any) -> int:
    if type(value) is types.ModuleType:
        return zlib.crc32(b"module")
    if type(value) is int:  # the text of a long one is refused
        return zlib.crc32(b"int%d" % hash(value))
    if type(value) in (str, bytes) and len(value) > LARGE:
        value = len(value), value[: LARGE // 2], value[-LARGE // 2 :]
    return zlib.crc32(repr(value).encode())


def _learns(cls: type) -> bool:
    return any(base.__module__.startswith("torch.") for base in cls.__mro__)
