"""The engine's own buffers of gradients: multiplied, wiped, thrown away, and put right after a backward that was cut
short. They are tables of DeepSpeed's optimizers, which have no functions for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nbtrain.compat import deepspeed as ds
from nbtrain.strategies.deepspeed.shares import EngineLayout


@torch.no_grad()
def multiply(
    layout: EngineLayout, trained: Iterable[torch.Tensor], local: Iterable[torch.Tensor], factor: float
) -> None:
    """`local`: stage 1's, of this rank, where stand-ins are in their place."""
    zero = layout.zero
    if layout.stage == 3:
        zero.grad_partitions_flat_buffer.mul_(factor)
        return
    found = [getattr(p, "grad_accum", None) for p in trained]
    found += [*local, *getattr(zero, "accumulated_grads_in_cpu", {}).values()]
    for table in (zero.all_grad_tensors, zero.averaged_gradients):
        found += [grad for grads in table.values() for grad in grads or ()]
    for grad in {id(grad): grad for grad in found if grad is not None}.values():
        grad.mul_(factor)


def wipe(layout: EngineLayout) -> None:
    """Buffers that would step a parameter without a gradient by its last one."""
    zero = layout.zero
    if layout.stage == 3:
        zero.grad_partitions_flat_buffer.zero_()
    offloaded = zero.offload_optimizer if layout.stage == 3 else zero.cpu_offload
    if offloaded:
        for flat in layout.flats:
            if flat.grad is not None and flat.grad.numel():
                flat.grad.zero_()


def discard(layout: EngineLayout, trained: Iterable[torch.Tensor]) -> None:
    """Everything that the engine holds of gradients, but for what `wipe` does."""
    zero = layout.zero
    zero.zero_grad()
    for name in ("averaged_gradients", "all_grad_tensors"):
        table = getattr(zero, name, None)
        if isinstance(table, dict):
            table.clear()
    for p in trained:
        if hasattr(p, "grad_accum"):
            p.grad_accum = None
    if layout.stage != 3:
        zero.micro_step_id = -1
    ds.forget_arrivals(zero)
    if hasattr(zero, "norm_for_param_grads"):
        zero.norm_for_param_grads = {}


def put_right(layout: EngineLayout) -> None:
    """A backward was cut short: the engine is to wait for none of its gradients."""
    zero = layout.zero
    ds.forget_backward(zero)
    for bucket in zero.ipg_buckets.values():
        if layout.stage == 3:
            bucket.clear_params()
        else:
            bucket.clear()
    already = zero.params_already_reduced
    for key in already if isinstance(already, dict) else range(len(already)):
        already[key] = False
