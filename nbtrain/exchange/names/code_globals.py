"""Finds in bytecode which global names a code object reads and writes.

Opcodes tell globals from attributes, locals and comprehension variables without any scope rules of our own.
The words are decoded by hand because `dis.get_instructions` is thirty times slower.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Set
from types import CodeType
from typing import NamedTuple
from weakref import WeakKeyDictionary


class CodeNames(NamedTuple):
    """Global names that code reads and writes."""

    reads: Set[str]
    writes: Set[str]


READ, WRITE, WRITE_OWN, EXTEND, JUMP = range(1, 6)

_KINDS = bytearray(256)
for _opcode in {*dis.hasjrel, *dis.hasjabs}:
    if _opcode < 256:
        _KINDS[_opcode] = JUMP
for _names, _kind in (
    # DELETE reads: the name has to be there
    ("LOAD_NAME LOAD_GLOBAL LOAD_FROM_DICT_OR_GLOBALS DELETE_NAME DELETE_GLOBAL", READ),
    ("STORE_GLOBAL", WRITE),
    ("STORE_NAME", WRITE_OWN),
    ("EXTENDED_ARG", EXTEND),
):
    for _name in _names.split():
        if _name in dis.opmap:
            _KINDS[dis.opmap[_name]] = _kind
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
# since 3.11 the lowest bit of LOAD_GLOBAL's argument says whether a call follows
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0

_RAISES_ON = dis.opmap.get("CALL_INTRINSIC_1")
"""Begins the handler that a generator or coroutine has around all of its code since 3.12: it swallows nothing."""

_KNOWN: WeakKeyDictionary[CodeType, CodeNames] = WeakKeyDictionary()


def function_names(code: CodeType) -> CodeNames:
    """The names of a function's code and of all code in it; remembered while the code lives."""
    known = _KNOWN.get(code)
    if known is None:
        known = _KNOWN[code] = code_names(code, module=False)
    return known


def code_names(code: CodeType, *, module: bool) -> CodeNames:
    """The names of any code. `module`: it runs in the namespace itself, so that what it stores by name are globals."""
    reads: set[str] = set()
    writes: set[str] = set()
    _collect(code, module, reads, writes)
    return CodeNames(frozenset(reads), frozenset(writes))


def _collect(code: CodeType, module: bool, reads: set[str], writes: set[str]) -> None:
    names = code.co_names
    words = code.co_code
    # stored before the first jump and the first `try` or `with`, hence surely bound wherever it is loaded later
    bound: set[str] = set()
    straight = True
    table = getattr(code, "co_exceptiontable", b"")
    tried = _first_tried(table, words) if table else len(words)
    high = 0
    for at, (opcode, low) in enumerate(zip(words[::2], words[1::2], strict=True)):
        kind = _KINDS[opcode]
        if not kind:
            high = 0
            continue
        argument = high | low
        high = argument << 8 if kind == EXTEND else 0
        if kind == READ:
            name = names[argument >> _GLOBAL_SHIFT if opcode == _LOAD_GLOBAL else argument]
            if name not in bound:
                reads.add(name)
        elif kind in (WRITE, WRITE_OWN):
            name = names[argument]
            if kind == WRITE or module:
                writes.add(name)
            if straight and at < tried:
                bound.add(name)
        elif kind == JUMP:
            straight = False
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, False, reads, writes)


def _first_tried(table: bytes, words: bytes) -> int:
    """The first instruction from which an exception leads on within the code: after it, what follows may not have run.
    Since Python 3.11 no jump says so, but a table: entries of four numbers, in the order of where they begin."""
    numbers = _numbers(table)
    for start, _, handler, _ in zip(numbers, numbers, numbers, numbers, strict=True):
        if words[2 * handler] != _RAISES_ON:
            return start
    return len(words)


def _numbers(table: bytes) -> Iterator[int]:
    """Six bits a byte, the highest first; the seventh says that the number goes on."""
    number = 0
    for byte in table:
        number = number << 6 | byte & 63
        if not byte & 64:
            yield number
            number = 0
