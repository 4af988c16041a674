"""torch's pytree: its functions have public names in a private module, and no public one has come by torch 2.15."""

from __future__ import annotations

from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch")

tree_flatten = its.name("torch.utils._pytree.tree_flatten")
tree_unflatten = its.name("torch.utils._pytree.tree_unflatten")
tree_leaves = its.name("torch.utils._pytree.tree_leaves")
tree_map = its.name("torch.utils._pytree.tree_map")
tree_map_only = its.name("torch.utils._pytree.tree_map_only")
_known = its.name("torch.utils._pytree.SUPPORTED_NODES")


def is_container(cls: type) -> bool:
    """Whether torch looks into objects of this class."""
    return cls in _known


def is_named_tuple(value: Any) -> bool:
    """Whether it is a tuple whose class takes its items one by one."""
    return isinstance(value, tuple) and hasattr(value, "_fields")
