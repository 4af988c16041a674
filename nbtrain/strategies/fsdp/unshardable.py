"""What fsdp cannot divide by rows: parameters that stay whole on every rank, and models that it does not take."""

from __future__ import annotations

import torch
from torch import nn

from nbtrain.compat.tensors import hook_tables
from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component, is_lazy
from nbtrain.strategies.fsdp.autograd_calls import refuse_hooks


def kept_whole(component: Component, roots: list[nn.Module]) -> list[torch.Tensor]:
    """Loose parameters, and those that cannot be divided by rows: gradients of these are averaged, as under ddp."""
    parts = [part for root in roots for part in root.modules()]
    sparse = {id(m.weight) for m in parts if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    inside = {id(p) for root in roots for p in root.parameters()}
    return [
        p for p in component.parameters() if id(p) not in inside or p.ndim == 0 or p.numel() == 0 or id(p) in sparse
    ]


def check(component: Component, kept: list[torch.Tensor]) -> None:
    """A sentence for a model of which fsdp can make nothing."""
    lazy = next((name for name, p in component.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise NotSupported(
            f"{lazy} has no shape yet, so that fsdp cannot divide it: call the model once on a batch in the notebook, "
            "or use --strategy ddp"
        )
    known = set(map(id, kept))
    divided = [p for p in component.parameters() if id(p) not in known]
    refuse_hooks(divided)
    if any(hook_tables(p)[1] for p in divided):
        raise NotSupported(
            "a parameter has a register_post_accumulate_grad_hook, and fsdp puts another tensor in its place: register "
            "the hook in the cell, or use --strategy ddp and work on the gradients between loss.backward() and "
            "optimizer.step()"
        )
    dtypes = {p.dtype for p in divided if p.requires_grad}
    if len(dtypes) > 1:
        raise NotSupported(
            f"fsdp divides models of one dtype, and this one has {', '.join(sorted(map(str, dtypes)))}. "
            "--strategy ddp takes any"
        )
