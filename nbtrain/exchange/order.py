"""In which order objects are told what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nbtrain.exchange.kinds.base import Packed, Put, Ref

LAST = 2
"""The turn (`Kind.turn`) of what runs a class's own `__setstate__`."""


def in_turn(puts: Iterable[Put], turn: Callable[[Put], int]) -> list[Put]:
    """By turn; and within the last, inner objects first, as pickle would: a `__setstate__` may use what it holds.

    Where objects hold each other, the one that was met first comes last.
    """
    ordered = sorted(puts, key=turn)
    last = [put for put in ordered if turn(put) == LAST]
    if len(last) < 2:
        return ordered
    by_key = {put.key: put for put in ordered}
    wanted = dict.fromkeys(put.key for put in last)
    inner_first = [by_key[key] for key in _after_what_they_hold(list(wanted), by_key) if key in wanted]
    return [*(put for put in ordered if put.key not in wanted), *inner_first]


def _after_what_they_hold(roots: list[int], by_key: dict[int, Put]) -> Iterator[int]:
    seen: set[int] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        trail = [(root, _refs(by_key[root].state))]
        while trail:
            key, held = trail[-1]
            inner = next((one for one in held if one in by_key and one not in seen), None)
            if inner is None:
                trail.pop()
                yield key
            else:
                seen.add(inner)
                trail.append((inner, _refs(by_key[inner].state)))


def _refs(state: Any) -> Iterator[int]:
    """Keys of the objects that an encoded state refers to."""
    todo = [state]
    while todo:
        value = todo.pop()
        if type(value) is Ref:
            yield value.key
        elif type(value) is Packed:
            todo.extend(value.parts)
        elif type(value) in (list, tuple):
            todo.extend(value)
