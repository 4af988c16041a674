"""Moves hooks on the gradients of a leaf tensor: `p.register_hook(mask)` is part of what a parameter is."""

from __future__ import annotations

from typing import Any

from nbtrain.compat import modules, tensors
from nbtrain.exchange.kinds.base import Receiver, Sender, keys_in

TABLES = (tensors.GRADIENT_HOOKS, tensors.ACCUMULATED_HOOKS)
NONE: tuple[tuple[int, ...], ...] = ((), ())

Hooks = list[Any]
"""Of both tables: the number its handle knows it by, and the hook; and the table on its gradient, which the handles of
the hooks there know."""


def hooked(tensor: Any) -> bool:
    return any(tensors.hook_tables(tensor)) and tensors.is_leaf(tensor)


def by_user(tensor: Any) -> bool:
    """Whether a hook is there that the other side has to get."""
    return hooked(tensor) and any(tensors.users_hooks(tensor, name) for name in TABLES)


def encoded(tensor: Any, walk: Sender) -> Hooks | None:
    """A tensor's hooks as they are sent; None without any, as nearly everywhere."""
    if not by_user(tensor):
        return None
    hooks = [[(number, walk.encode(hook)) for number, hook in tensors.users_hooks(tensor, name)] for name in TABLES]
    return [*hooks, walk.encode(tensors.hook_table(tensor, TABLES[0])) if hooks[0] else None]


def keys_of(hooks: Hooks | None) -> tuple[tuple[int, ...], ...]:
    """Keys of the hooks' nodes; 0 of one that nobody asked for yet."""
    if hooks is None:
        return NONE
    return tuple(tuple(key for _, hook in table for key in tuple(keys_in(hook)) or (0,)) for table in hooks[:2])


def install(tensor: Any, hooks: Hooks | None, receiver: Receiver) -> None:
    """Make these the tensor's only hooks, beside those of the strategy."""
    wanted_hooks: Hooks = hooks or [[], [], None]
    decoded = [[(number, receiver.decode(hook)) for number, hook in table] for table in wanted_hooks[:2]]
    shared = receiver.decode(wanted_hooks[2])
    if shared is not None and tensor.requires_grad:
        shared.update(decoded[0])  # torch takes no empty one, and its own content may come later
        if tensors.hook_table(tensor, TABLES[0]) is not shared:
            tensors.put_gradient_hooks(tensor, shared)
    for name, wanted in zip(TABLES, decoded, strict=True):
        table = tensors.hook_table(tensor, name)
        if table is None and wanted and tensor.requires_grad:
            add = tensor.register_hook if name == TABLES[0] else tensor.register_post_accumulate_grad_hook
            add(wanted[0][1])  # torch makes the table
            table = tensors.hook_table(tensor, name)
            assert table is not None
            table.clear()
        if table is not None:
            for number, _ in tensors.users_hooks(tensor, name):
                del table[number]
            table.update(wanted)
            modules.reserve_hook_keys(number for number, _ in wanted)
