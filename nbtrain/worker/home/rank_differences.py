"""Computes a number per name, by which the notebook sees which names differ between ranks.

Models, optimizers and loaders are left out: what a strategy keeps equal is compared by
`worker/ranks/replica_checksums.py`. Only of a model that the cell has made, and that was never set up, the parameters
are looked at: a loop may have trained them by hand, on each rank for itself. Tensors, arrays and lists of plain values
are looked at as a whole, but for memory that nobody here has written to; of a long list of other objects only its
length and both its ends: this runs after every cell.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import sys
import types
import zlib
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from nbtrain.compat.modules import tensors_of
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import ATOMS
from nbtrain.exchange.kinds.checksum import array_checksum, checksum
from nbtrain.exchange.kinds.objects import INSTANCE
from nbtrain.exchange.shared_memory import untouched

ITEMS = 1000
"""Objects looked at below one name"""
DEEP = 100
"""Levels."""
LARGE = 1 << 20
"""Bytes up to which strings are read; from here on it is asked whether memory was written to at all."""
LISTS = (list, tuple, collections.deque)
MANY = 100
"""Elements from which a list of plain values is packed to be compared."""
NOT_PLAIN = {types.ModuleType, re.Pattern}
SETS = (set, frozenset)
DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def number(
    value: Any,
    table: ObjectTable,
    passed_by: Iterable[int] = (),
    checksums: dict[int, int] | None = None,
    weights: Callable[[], Container[int]] | None = None,
) -> int:
    """`table` knows checksums of what came from the notebook. `passed_by`: ids of objects that stay here, each rank's
    own. `checksums` gets those of large tensors, by id: to read them once more takes as long.
    `weights`: ids of tensors that are compared elsewhere; asked for where there is a model."""
    return _Look(table, passed_by, {} if checksums is None else checksums, weights).at(value)


class _Look:
    def __init__(
        self,
        table: ObjectTable,
        passed_by: Iterable[int],
        checksums: dict[int, int],
        weights: Callable[[], Container[int]] | None,
    ) -> None:
        self.table = table
        self.weights = weights
        self.checksums = checksums
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
            number_seen = self._look(value)
        except Exception:  # a nested tensor has no shape; a class may hide its attributes
            number_seen = 0
        self.depth -= 1
        self.seen[id(value)] = number_seen
        return number_seen

    def _look(self, value: Any) -> int:
        cls: Any = type(value)
        if cls in ATOMS:
            return _atom(value)
        if cls in LISTS or cls in DICTS:
            plain = _plain(value) if len(value) > MANY else None
            if plain is not None:
                return self._all(cls, len(value), [plain])
        if cls in LISTS:
            return self._all(cls, len(value), map(self.at, self._ends(value)))
        if cls in SETS:
            return self._all(cls, len(value), [sum(map(self.at, value))] if len(value) < self.left else [])
        if cls in DICTS:
            return self._all(cls, len(value), (self.at(part) for pair in self._ends(value.items()) for part in pair))
        if cls is types.FunctionType and value.__module__ == "__main__":
            return self._all(cls, 0, map(self.at, _of_function(value)))
        if issubclass(cls, tuple):  # a named one, say
            return self._all(cls, len(value), map(self.at, self._ends(tuple(value))))
        if cls.__module__ == "__main__" and not _learns(cls):
            fields = dict(zip(*INSTANCE.fields(value), strict=True))
            if fields:
                return self.at(fields)
        return self._memory(value)

    def _ends(self, items: Any) -> Any:
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

    def _memory(self, value: Any) -> int:
        if id(value) in self.table.apart:  # no rank has all of it
            return 0
        torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and type(value) is torch.Tensor:
            shape = f"{value.dtype}{tuple(value.shape)}{value.requires_grad}"
            plain = value.nbytes > LARGE and value.device.type == "cpu" and value.is_contiguous()
            known = self._known(value, 3) if plain and untouched(value.data_ptr(), value.nbytes) else None
            if known is None:
                known = checksum(value)
                if plain:
                    self.checksums[id(value)] = known
            return zlib.crc32(f"{shape}{known}".encode())
        if torch is not None and issubclass(type(value), torch.nn.Module):
            return self._of_model(value, torch.nn.Parameter)
        if np is not None and type(value) is np.ndarray:
            shape = f"{value.dtype}{value.shape}"
            if value.dtype.hasobject:
                return zlib.crc32(shape.encode())
            plain = value.nbytes > LARGE and value.flags.c_contiguous
            known = self._known(value, 2) if plain and untouched(value.ctypes.data, value.nbytes) else None
            return zlib.crc32(f"{shape}{array_checksum(value) if known is None else known}".encode())
        return 0

    def _of_model(self, model: Any, parameter: type[Any]) -> int:
        if self.table.find(model) is not None or self.weights is None:
            return 0
        elsewhere = self.weights()
        parameters = [p for p in tensors_of(model)[0] if type(p) is parameter and id(p) not in elsewhere]
        made = [p for p in parameters if self.table.find(p) is None]
        return self._all(type(model), len(made), (checksum(p) for p in made)) if made else 0

    def _known(self, value: Any, where: int) -> int | None:
        """The checksum of memory that nobody has written to since it came."""
        node = self.table.find(value)
        if node is None or type(node.seen) is not tuple or len(node.seen) <= where:
            return None
        number_seen = node.seen[where]
        return number_seen if type(number_seen) is int and not (where == 2 and node.fixed) else None


def _of_function(function: types.FunctionType) -> list[Any]:
    """What a function holds besides its code, which all ranks have from the same text."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            cells.append(cell.cell_contents)
    return [function.__defaults__, function.__kwdefaults__, dict(function.__dict__), cells]


def _atom(value: Any) -> int:
    if type(value) is types.ModuleType:
        return zlib.crc32(b"module")
    if type(value) is int:  # the text of a long one is refused
        return zlib.crc32(b"int%d" % hash(value))
    if type(value) in (str, bytes) and len(value) > LARGE:
        value = len(value), value[: LARGE // 2], value[-LARGE // 2 :]
    return zlib.crc32(repr(value).encode())


def _plain(value: Any) -> int | None:
    """A number for a container of atoms only; None if it holds other objects."""
    parts = (value, value.values()) if isinstance(value, dict) else (value,)
    if not all(set(map(type, part)) <= ATOMS - NOT_PLAIN for part in parts):
        return None
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    pickler.fast = True  # two equal strings may be one object on some ranks
    pickler.dump(list(value.items()) if isinstance(value, dict) else list(value))
    return zlib.crc32(file.getbuffer())


def _learns(cls: type) -> bool:
    return any(base.__module__.startswith("torch.") for base in cls.__mro__)
