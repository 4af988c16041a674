"""FSDP2, torch's `fully_shard`: what a unit has gathered, and where its forward and backward stand.

torch speaks of a unit by its state, which has groups of weights that are gathered together; a weight is kept in pieces
(`sharded`), and whole while it is needed (`gathered`). All of it is there in torch 2.8 to 2.15 but for what says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from nbtrain.compat import tested_versions as versions
from nbtrain.compat.dtensor import local
from nbtrain.compat.internals import Internals
from nbtrain.compat.modules import class_before

its = Internals("torch")

_FOLDER = "torch.distributed.fsdp._fully_shard"
_STATE, _GROUP = f"{_FOLDER}._fsdp_state.FSDPState", f"{_FOLDER}._fsdp_param_group.FSDPParamGroup"
_STAGES = its.name(f"{_FOLDER}._fsdp_common.TrainingState")
_states_by_module = its.name("torch.distributed._composable_state._module_state_mapping")
its.members(f"{_FOLDER}._fsdp_common.TrainingState", "FORWARD", "IDLE")
its.members("torch.distributed.fsdp.fully_shard", "state")
its.members(_STATE, "_lazy_init", "_register_pre_backward_hook", "_root_post_backward_final_callback")
its.fields(_STATE, "_fsdp_param_group", "_training_state", "_state_ctx", "_comm_ctx")
its.fields(f"{_FOLDER}._fsdp_state.FSDPStateContext", "iter_forward_root", "post_backward_final_callback_queued")
its.members(f"{_FOLDER}._fsdp_param.FSDPParam", "_setattr_on_modules")
its.members(_GROUP, "is_unsharded", "unshard", "wait_for_unshard", "post_backward", "_to_sharded")
its.fields(_GROUP, "fsdp_params", "reduce_grads", "_training_state", "_partial_reduce_output", "_post_forward_indices")
its.fields(f"{_FOLDER}._fsdp_param.FSDPParam", "sharded_param", "_unsharded_param", "unsharded_accumulated_grad")
its.fields(
    f"{_FOLDER}._fsdp_param.FSDPParam", "_sharded_param_data", "all_gather_outputs", "_module_info", "orig_dtype"
)

_classes: dict[type, type] = its.name(f"{_FOLDER}._fully_shard.cls_to_fsdp_cls")
_no_deepcopy = its.name(f"{_FOLDER}._fully_shard._unimplemented_deepcopy")


_UNREDUCED = "unsharded_accumulated_grad"
"""What batches without communication have added up. An attribute until torch 2.14; from 2.15 on it is the gathered
weight's own gradient, of which this is another name that cannot be set."""


# --- what there is -------------------------------------------------------------------------------


def set_up(root: nn.Module) -> None:
    """Initialise `root` once all its units are made, as torch does before the first forward."""
    state(root)._lazy_init()


def make_class(cls: type) -> None:
    """Make the class that torch gives units of this one: its own would not fit one that begins with ABC, or Generic."""
    if cls not in _classes:
        _classes[cls] = class_before(FSDPModule, cls, f"FSDP{cls.__name__}", {"__deepcopy__": _no_deepcopy})


def take_number(param: torch.Tensor) -> None:
    """Take off the number that newer torch gives a weight before it cuts it, and needs no longer then: no two
    processes count alike."""
    vars(param).pop("_fsdp_orig_uid", None)


def state(unit: nn.Module) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]  # torch sets it on the function


def average_rightly(unit: Any) -> None:
    """Have gloo sum and torch divide: before torch 2.12 gloo sums rows also where it is told to average them."""
    if versions.release(torch.__version__) < (2, 12) and dist.get_backend() != dist.Backend.NCCL:
        unit.set_force_sum_reduction_for_comms(True)


def groups(state: Any) -> list[Any]:
    many = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on
    if many is not None:
        return list(many)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def weights(group: Any) -> list[Any]:
    parameters: list[Any] = group.fsdp_params
    return parameters


def sharded(weight: Any) -> Any:
    """The parameter in pieces."""
    return weight.sharded_param


def unsharded(weight: Any) -> Any:
    """The parameter that a forward sees, with or without memory behind it; None before the first."""
    return getattr(weight, "_unsharded_param", None)


def give_memory(weight: Any, part: torch.Tensor) -> None:
    """Make this tensor a weight's part, and what is gathered. torch sends a flat tensor of the same memory, which has
    one size on all ranks, so the memory may have to grow."""
    sent: torch.Tensor = weight._sharded_param_data
    mine = local(weight.sharded_param)
    if type(sent) is not torch.Tensor:  # a class that says itself what is sent
        mine.copy_(part)
        return
    pinned = sent.is_pinned()
    if pinned != part.is_pinned() or not part.untyped_storage().resizable():
        own = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device, pin_memory=pinned)
        part = own[: part.numel()].view(part.shape).copy_(part)
    size, memory = (int(part.storage_offset()) + sent.numel()) * part.itemsize, part.untyped_storage()
    if memory.nbytes() < size:
        memory.resize_(size)
    mine.data = part
    weight._sharded_param_data = part.as_strided((sent.numel(),), (1,))


def forget(unit: nn.Module) -> None:
    """Remove a unit from torch's table of what it has set up."""
    _states_by_module.pop(unit, None)


# --- forward and backward ------------------------------------------------------------------------


def in_forward(state: Any) -> bool:
    return bool(state._training_state is _STAGES.FORWARD)


def at_rest(group: Any) -> bool:
    """Whether no forward or backward of a state or a group is under way."""
    return bool(group._training_state is _STAGES.IDLE)


def reshard(state: Any) -> None:
    """Release gathered weights, where no forward or backward is under way. `FSDPModule.reshard` checks less."""
    if at_rest(state):
        for group in groups(state):
            if at_rest(group):
                group._to_sharded()


def is_gathered(state: Any) -> bool:
    """Whether all of a unit's weights are gathered, and stay so until they are released."""
    return all(group.is_unsharded for group in groups(state))


def show_pieces(state: Any) -> None:
    """Put the parameters in pieces on the modules. What is gathered stays: graphs have it."""
    for weight in all_weights(state):
        weight._setattr_on_modules(weight.sharded_param)


def show_gathered(state: Any) -> None:
    """Put the gathered parameters on the modules, as torch does for a forward."""
    for weight in all_weights(state):
        part, full = weight.sharded_param, unsharded(weight)
        if full.requires_grad != part.requires_grad:
            full.requires_grad_(part.requires_grad)
        weight._setattr_on_modules(full)


# --- gradients that wait -------------------------------------------------------------------------


def reduces(group: Any) -> bool:
    """Whether the next backward communicates this group's gradients."""
    return bool(group.reduce_grads)


def held_back(weight: Any) -> list[torch.Tensor]:
    """Whole gradients that wait for the next backward that is communicated."""
    full = unsharded(weight)
    gradients = vars(weight).get(_UNREDUCED), None if full is None else full.grad
    return [gradient for gradient in gradients if gradient is not None]


def drop_held_back(weight: Any) -> None:
    if _UNREDUCED in vars(weight):
        setattr(weight, _UNREDUCED, None)
    full = unsharded(weight)
    if full is not None:
        full.grad = None


def give_zeros(weight: Any) -> None:
    """Give a weight that this backward did not use a gradient of zeros, of the type that its group has: from torch 2.15
    on that may be another than the weight's."""
    full = unsharded(weight)
    full.grad = torch.zeros_like(full, dtype=getattr(full, "grad_dtype", None))


# --- after an error ------------------------------------------------------------------------------


def reset_tree(root: Any, states: Iterable[Any]) -> None:
    """Forget an unfinished forward or backward, with the gradients it had gathered. Those of the parameters in pieces
    stay; torch itself would drop them from 2.15 on."""
    states = list(states)
    kept = [(part, part.grad) for part in (sharded(weight) for state in states for weight in all_weights(state))]
    try:
        if hasattr(root, "reset_iter_state"):  # from torch 2.13 on; it waits for what is under way, too
            with suppress(RuntimeError, AttributeError):  # what it waits for may have been aborted
                root.reset_iter_state()
    finally:
        for part, gradient in kept:
            if part.grad is not gradient:
                part.grad = gradient
    for state in states:
        reset_unit(state)


def reset_unit(state: Any) -> None:
    """Forget what one unit was in the middle of, as `reset_tree` does for all."""
    state._training_state = _STAGES.IDLE
    _clear(state, "_modules_to_run_forward")
    shared, sent = state._state_ctx, state._comm_ctx
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    shared.is_last_backward = True
    _set(shared, None, "manual_backward_finalization_active")  # torch 2.15
    _set(shared, False, "gradient_reduction_pending")  # torch 2.15
    _clear(sent, "post_forward_order", "reduce_scatter_states", "_last_post_reduce_events")  # 2.8, 2.12, 2.13
    _set(sent, None, "all_gather_state", "reduce_scatter_state", "active_gradient_reduction")  # 2.8, until 2.10, 2.15
    for group in groups(state):
        _set(group, None, "_all_gather_result", "_post_reduce_event", "_all_reduce_state")
        _set(group, None, "_reshard_after_forward_event")
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        _set(group, False, "_post_backward_pending")  # torch 2.15
        _clear(group, "_partial_reduce_output_layout")  # torch 2.15
        group._training_state = _STAGES.IDLE
        group._to_sharded()
        for weight in weights(group):
            drop_held_back(weight)
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15: a backward changes them until it has ended
            group._set_unsharded_grad_dtypes(defer_upcast=False)


def all_weights(state: Any) -> Iterator[Any]:
    for group in groups(state):
        yield from weights(group)


def replaced(weights: Iterable[Any]) -> tuple[nn.Module, str, bool] | None:
    """Module and name of a parameter in the place of which is neither its piece nor what is gathered of it: torch would
    put its own there again. Or, and then True, of one that has got another dtype."""
    for weight in weights:
        info, own = weight._module_info, (weight.sharded_param, getattr(weight, "_unsharded_param", None))
        places = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        for module, name in places:
            there = module._parameters.get(name)
            if there is None or (there is not own[0] and there is not own[1]):
                return module, name, False
        part, data = own[0]._local_tensor, weight._sharded_param_data
        if part.dtype is not weight.orig_dtype:
            return info.module, info.param_name, True
        # A class of tensors may have no memory of its own to ask for.
        if type(part) is type(data) is torch.Tensor and part.data_ptr() != data.data_ptr() and part.numel():  # swapped
            return info.module, info.param_name, False
    return None


def _set(owner: Any, value: Any, *names: str) -> None:
    for name in names:
        if hasattr(owner, name):
            setattr(owner, name, value)


def _clear(owner: Any, *names: str) -> None:
    for name in names:
        getattr(owner, name, set()).clear()


# --- what nbtrain adds, each on one state or group -------------------------------------------------

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def around_gathering(group: Any, start: Around, wait: Around) -> None:
    """Wrap what starts to gather a group's weights, and what waits for them."""
    group.unshard = start(group.unshard)
    group.wait_for_unshard = wait(group.wait_for_unshard)


def around_outputs(state: Any, around: Around) -> None:
    """Wrap what is called with a unit's output and registers the hook that gathers for the backward."""
    state._register_pre_backward_hook = around(state._register_pre_backward_hook)


def around_reduction(group: Any, around: Around) -> None:
    """Wrap what sends a group's gradients once they are computed."""
    group.post_backward = around(group.post_backward)


def around_end(state: Any, around: Around) -> None:
    """Wrap what is called when a backward that began at this unit has ended."""
    state._root_post_backward_final_callback = around(state._root_post_backward_final_callback)
