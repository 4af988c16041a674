"""Hooks on the gradients of a leaf: `p.register_hook(mask)` is part of what a parameter is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbtrain.compat import tensors
from nbtrain.exchange.kinds.base import keys_in

if TYPE_CHECKING:
    from nbtrain.exchange.visit import Visit

TABLES = (tensors.GRADIENT_HOOKS, tensors.ACCUMULATED_HOOKS)
NONE: tuple[tuple[int, ...], ...] = ((), ())

Hooks = list[list[tuple[int, Any]]]
"""Of both tables: the number its handle knows it by, and the hook."""


def hooked(tensor: Any) -> bool:
    return any(tensors.hook_tables(tensor)) and tensor.is_leaf


def encoded(tensor: Any, walk: Visit) -> Hooks | None:
    """None where there are none, as nearly everywhere."""
    if not hooked(tensor):
        return None
    found = [[(number, walk.encode(hook)) for number, hook in _own(tensor, name)] for name in TABLES]
    return found if any(found) else None


def keys_of(hooks: Hooks | None) -> tuple[tuple[int, ...], ...]:
    """By which both sides know them."""
    if hooks is None:
        return NONE
    return tuple(tuple(key for _, hook in table for key in keys_in(hook)) for table in hooks)


def hang(tensor: Any, hooks: Hooks | None) -> None:
    """These and no others, but for the ones of the strategy."""
    for name, wanted in zip(TABLES, hooks or ([], []), strict=True):
        table = tensors.hook_table(tensor, name)
        if table is None and wanted and tensor.requires_grad:
            add = tensor.register_hook if name == TABLES[0] else tensor.register_post_accumulate_grad_hook
            add(wanted[0][1])  # torch makes the table
            table = tensors.hook_table(tensor, name)
            assert table is not None
            table.clear()
        if table is not None:
            for number, _ in _own(tensor, name):
                del table[number]
            table.update(wanted)


def _own(tensor: Any, name: str) -> list[tuple[int, Any]]:
    """The program's own. A strategy hangs its averaging there."""
    table = tensors.hook_table(tensor, name) or {}
    ours = "nbtrain."
    return [pair for pair in table.items() if not (getattr(pair[1], "__module__", "") or "").startswith(ours)]
