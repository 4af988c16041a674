"""What fully_shard is told, and which weights of a component it leaves whole. Which modules are wrapped is found in
`kit/units_to_wrap.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from nbtrain.base.errors import NotSupported
from nbtrain.compat.tensors import hook_tables
from nbtrain.strategies.base import Component, is_lazy
from nbtrain.strategies.fsdp import autograd_calls
from nbtrain.strategies.kit.component_tensors import named_parameters
from nbtrain.strategies.kit.gradient_buckets import DTYPES


def kept_whole(component: Component, roots: list[nn.Module]) -> list[torch.Tensor]:
    """Loose parameters, and those that cannot be divided by rows. Their gradients are averaged, as under ddp."""
    parts = [part for root in roots for part in root.modules()]
    sparse = {id(m.weight) for m in parts if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    inside = {id(p) for root in roots for p in root.parameters()}
    return [
        p for p in component.parameters() if id(p) not in inside or p.ndim == 0 or p.numel() == 0 or id(p) in sparse
    ]


def check(component: Component, kept: list[torch.Tensor]) -> None:
    """Raises for a model that fsdp cannot divide."""
    lazy = next((name for name, p in named_parameters(component) if is_lazy(p)), None)
    if lazy is not None:
        raise NotSupported(
            f"{lazy} has no shape yet, so that fsdp cannot divide it: call the model once on a batch in the notebook, "
            "or use --strategy ddp"
        )
    known = set(map(id, kept))
    divided = [p for p in component.parameters() if id(p) not in known]
    for p in divided:
        autograd_calls.refuse_hooks(p, None, component)
    if any(hook_tables(p)[1] for p in divided):
        raise NotSupported(
            "a parameter has a register_post_accumulate_grad_hook, and fsdp puts another tensor in its place: register "
            "the hook in the cell, or write what it does between loss.backward() and optimizer.step(): "
            "`with whole(model, gradients=True): …`"
        )
    dtypes = {p.dtype for p in divided if p.requires_grad}
    if len(dtypes) > 1:
        raise NotSupported(
            f"fsdp divides models of one dtype, and this one has {', '.join(sorted(map(str, dtypes)))}. "
            "--strategy ddp takes any"
        )


def policies(options: Any, mesh: DeviceMesh, is_root: bool, kept: list[torch.Tensor]) -> dict[str, Any]:
    """What `fully_shard` is told."""
    chosen: dict[str, Any] = {"mesh": mesh}
    chosen["reshard_after_forward"] = False if options.sharding == "SHARD_GRAD_OP" else None
    if options.comm_dtype != "none":
        dtype = DTYPES[options.comm_dtype]
        chosen["mp_policy"] = (
            MixedPrecisionPolicy(reduce_dtype=dtype)
            if options.comm_dtype == "fp32"
            else MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=dtype, output_dtype=torch.float32 if is_root else None
            )
        )
    if options.cpu_offload:
        chosen["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    if kept:
        chosen["ignored_params"] = set(kept)
    return chosen
