"""What has to be equal for a model's forward to do the same: then its record (record_forward.py) holds.

That is what it is given, and what the code of the modules whose forward is written down reads besides
(kit/forward_reads.py). Parts run as they are: what they read is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nbtrain.compat import modules
from nbtrain.strategies.kit.forward_reads import ReadCollector
from nbtrain.strategies.pipeline.cut_stages import StagedModel


def form_of(staged: StagedModel, leaves: list[Any], tree: Any) -> Any:
    """What must be equal for two calls of the model to have the same program."""
    given = tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else _given(leaf)
        for leaf in leaves
    )
    return given, str(tree), constants(staged), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def constants(staged: StagedModel) -> tuple[Any, ...]:
    """What the forward reads that is no tensor's number."""
    return tuple(ReadCollector(written(staged), staged.root).found)


def written(staged: StagedModel) -> Iterator[nn.Module]:
    """The modules whose forward is written down, or that merely hold such: neither parts nor inside of one."""
    parts = {id(part) for part in staged.parts}
    seen = {id(staged.root)}
    todo = [staged.root]
    while todo:
        module = todo.pop()
        yield module
        for inner in modules.children(module).values():
            if inner is not None and id(inner) not in parts and id(inner) not in seen:
                seen.add(id(inner))
                todo.append(inner)


def _given(leaf: Any) -> Any:
    return (type(leaf), leaf) if isinstance(leaf, (int, float, str, bool, bytes, type(None))) else id(leaf)
