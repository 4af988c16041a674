"""DeepSpeed: what its engine and its optimizers keep of gradients, pieces and hooks, and where they are in a backward.

DeepSpeed calls its wrapper of the model the engine; the engine's optimizer, here `zero`, cuts parameters and gradients
up, holds the pieces and steps them. Nothing here imports DeepSpeed before it is used.

All of it is there in 0.19.8; older versions lack names, and are refused. Before 0.19.4 DeepSpeed cannot be told that
the loop decides when to step (`managed_gradient_accumulation`): each backward ends the gathering of gradients, and a
loop that accumulates would step with the last one alone. 0.19.4 can, but not with an offloaded optimizer. Until 0.19.7
stages 1 and 2 silently send no gradients on the CPU without `contiguous_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("deepspeed", only_if_loaded="deepspeed")  # importing it settles on a kind of device

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_BASE = "deepspeed.runtime.base_optimizer.ZeROOptimizer"
_TWO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_THREE = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_INIT = "deepspeed.runtime.zero.partition_parameters.Init"
_HOOKS = "deepspeed.runtime.zero.parameter_offload"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_GROUPS = "deepspeed.utils.groups"

# --- what is replaced (nbtrain/compat/replaced_functions.py) --------------------------------------------

BUILD_SHM = "deepspeed.comm.torch.build_shm_op"
"""Compiles an op for inference collectives, for half a minute, as soon as a process group is made."""
JIT_LOAD = "deepspeed.ops.op_builder.builder.OpBuilder.jit_load"
"""Compiles an op when it is first used: silently, in every rank."""
EMPTY_PARAMETER = "deepspeed.runtime.zero.partition_parameters.free_param"
"""Frees the memory of a partitioned parameter and leaves an empty tensor in its place."""
CUT_TO_BLOCKS = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper._adjust_for_misaligned_lengths"
"""Keeps in memory the ends of tensors that do not fill a block of the disk; beginnings that do not, it forgets."""
SEND_WEIGHTS = f"{_ENGINE}._broadcast_model"
"""Sends the weights of rank 0 to all when an engine is made."""
SEND_WEIGHT = f"{_INIT}._zero_init_param"
"""Sends one parameter of rank 0 to all, under stage 3, before it is partitioned."""
LINEAR = "deepspeed.runtime.zero.linear.zero3_linear_wrap"
"""What it puts in the place of `torch.nn.functional.linear`, unless its config says `memory_efficient_linear: false`:
it keeps the weight for the backward, not a view of the gathered one."""
LINEAR_FUNCTION = "deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3"
"""What that calls."""

its.members("deepspeed.comm.torch", "build_shm_op")
its.members("deepspeed.runtime.zero.partition_parameters", "free_param")
its.takes(JIT_LOAD, "self", "verbose")
its.takes(CUT_TO_BLOCKS, "self", "tensors", "offsets")
its.takes(SEND_WEIGHTS, "self")
its.takes(SEND_WEIGHT, "self", "param")
its.takes(LINEAR, "input", "weight", "bias")
its.members(LINEAR_FUNCTION, "apply")
its.members(_INIT, "_convert_to_deepspeed_param", "param_id")
its.members(_HOOKS, "FWD_MODULE_STACK")
its.takes(f"{_HOOKS}.DeepSpeedZeRoOffload._register_deepspeed_module", "self", "module", "count")
its.members(_COORDINATOR)
its.members(_GROUPS, "_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP")
its.members("deepspeed.comm.comm", "cdb")
its.fields("deepspeed.comm.torch.TorchBackend", "all_gather_function", "reduce_scatter_function")
_HOOK_STATE = "deepspeed.runtime.base_optimizer.BackwardHookStateManager"
its.members(_ENGINE, "_backward_prologue", "_backward_post_hook", "allreduce_gradients")
its.members(_ENGINE, "is_gradient_accumulation_boundary", "managed_gradient_accumulation")
its.fields(_ENGINE, "_manual_backward_expected", "_running_engine_step", "enable_backward_allreduce", "basic_optimizer")
its.members(_BASE, "_backward_active_depth", "clear_backward_seen_flag", "exit_backward")
its.members(_BASE, "register_grad_acc_post_hook", "unregister_grad_acc_post_hooks")
its.fields(_BASE, "_backward_hook_state")
its.members(_HOOK_STATE, "reset_for_new_step")
its.fields(_HOOK_STATE, "remaining_grad_acc_hooks", "backward_active_depth")
its.members(_TWO, "process_gradients", "scaled_global_norm", "override_loss_scale", "get_param_id")
its.members(_TWO, "_use_compact_grad_partition_buffer")
its.fields(
    _TWO,
    *("_offload_accumulated_param_ids", "all_grad_tensors", "averaged_gradients", "bit16_groups", "bit16_groups_flat"),
    *("cpu_offload", "ipg_buckets", "micro_step_id", "parallel_partitioned_bit16_groups", "params_already_reduced"),
    *("params_in_partition", "partition_size", "real_dp_process_group", "round_robin_bit16_groups"),
    *("round_robin_bit16_offsets", "single_partition_of_fp32_groups"),
)
its.members(
    _THREE,
    *("reduce_ready_partitions_and_remove_grads", "override_loss_scale", "get_param_id", "_partition_all_parameters"),
    *("_swappable_optimizer_subgroup", "_optimizer_states_and_gradient_swap_in"),
    *("_optimizer_states_and_gradient_swap_out", "_release_swap_buffers"),
)
its.fields(
    _THREE,
    *("_offload_boundary_param_ids", "fp16_groups", "fp16_partitioned_groups_flat_numel"),
    *("fp32_partitioned_groups_flat", "grad_position", "ipg_buckets", "offload_optimizer", "params_already_reduced"),
)


# --- the whole process ---------------------------------------------------------------------------


def use_group(world: Any, gather: Callable[..., Any], scatter: Callable[..., Any]) -> None:
    """Have DeepSpeed use this process group: it forgets the groups it knew and makes none. `gather` and `scatter`
    replace torch's functions, which DeepSpeed keeps as they were when it was imported."""
    deepspeed: Any = import_module("deepspeed")
    comm, groups = import_module("deepspeed.comm.comm"), import_module(_GROUPS)
    known: Any = groups
    comm.cdb = None  # type: ignore[attr-defined]  # a module's types are not known where it is imported by name
    known._DATA_PARALLEL_GROUP = known._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    known._ALL_TO_ALL_GROUP = {}
    deepspeed.init_distributed(verbose=False)
    known._WORLD_GROUP = world  # it would make a clone of the group
    backend: Any = comm.cdb
    backend.all_gather_function, backend.reduce_scatter_function = gather, scatter


def counts() -> list[int]:
    """How many parameters and modules stage 3 has numbered in this process: ranks compare these numbers."""
    return [import_module("deepspeed.runtime.zero.partition_parameters").Init.param_id, _module_count()[0]]


def set_counts(parameters: int, modules: int) -> None:
    import_module("deepspeed.runtime.zero.partition_parameters").Init.param_id = parameters
    _module_count()[0] = modules


def _module_count() -> list[int]:
    """DeepSpeed's counter: it is the default of an argument."""
    (default,) = import_module(_HOOKS).DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count: list[int] = default
    return count


def forget_module(module: Any) -> int:
    """Remove a module from DeepSpeed's tables of the process; returns how often it was in the one that DeepSpeed does
    not fill again."""
    stack = import_module(_HOOKS).FWD_MODULE_STACK
    before = len(stack)
    stack[:] = [other for other in stack if other is not module]
    # A cache without a limit, by module: each engine of stage 3 would stay, with its pieces and its groups.
    way, _, name = _COORDINATOR.rpartition(".")
    for function in vars(getattr(import_module(way), name)).values():
        for cache in (function, *(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())):
            if hasattr(cache, "cache_clear"):
                cache.cache_clear()
    return before - len(stack)


def remember_module(module: Any, times: int) -> None:
    """Undo `forget_module`."""
    import_module(_HOOKS).FWD_MODULE_STACK[:0] = [module] * times


def cut_up(init: Any, parameter: Any) -> None:
    """Partition a parameter as `SEND_WEIGHT` does, without sending it."""
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()


# --- what it puts on modules, parameters and outputs -----------------------------------------------

_HUNG_LATER = frozenset(
    {
        "applied_pre_backward_ref_cnt", "_external_params", "_original_parameters", "all_parameters", "_z3_optimizer",
        "pre_bwd_fn", "post_bwd_fn",
    }
)  # fmt: skip
_MANAGERS = "_backward_hook_managers"


def hangs(attribute: str) -> bool:
    """Whether DeepSpeed puts this attribute on modules or parameters; some come only when they are used."""
    return attribute.startswith("ds_") or attribute in _HUNG_LATER


def gathers(node: Any) -> bool:
    """Whether stage 3 gathers or frees weights at this node of a graph."""
    return type(node).__name__.startswith(("PreBackwardFunctionForModule", "PostBackwardFunctionModule"))


def is_marked(output: Any) -> bool:
    """Whether the engine has marked a model's output, to find that a backward begins."""
    return hasattr(output, _MANAGERS)


def unmark(output: Any) -> None:
    vars(output).pop(_MANAGERS, None)


# --- a backward ----------------------------------------------------------------------------------


def around_beginning(engine: Any, around: Callable[[Callable[[], None]], Callable[[], None]]) -> Callable[[], None]:
    """Wrap what the engine calls before the first gradient of a backward; returns what it calls now."""
    begin = engine._backward_prologue = around(engine._backward_prologue)
    return begin


def in_backward(zero: Any) -> bool:
    """Whether a backward of this engine is under way."""
    return bool(zero._backward_active_depth)


def has_begun_once(zero: Any) -> None:
    """Count the backward as begun once, whatever announced it (a parameter's hook may have): one end will end it."""
    zero._backward_active_depth = 1


def expect_scaled(engine: Any) -> None:
    """Allow a backward whose loss was scaled by others, which DeepSpeed refuses otherwise."""
    engine._manual_backward_expected = True


def end_backward(engine: Any) -> None:
    """Do what the engine does once all gradients have come."""
    engine._backward_post_hook()


def forget_backward(zero: Any) -> None:
    """Forget a backward that was cut short, and wait for none of its gradients."""
    hooks = zero._backward_hook_state
    hooks.reset_for_new_step()
    hooks.remaining_grad_acc_hooks = hooks.backward_active_depth = 0


def gather_all(engine: Any) -> None:
    """Reduce the gradients of stage 1 over the ranks now, as `step()` does where the loop decides when to step."""
    engine._running_engine_step = True
    try:
        engine.allreduce_gradients()
    finally:
        engine._running_engine_step = False


# --- gradients that it holds -----------------------------------------------------------------------


def is_in_one_piece(zero: Any, group: int) -> bool:
    """Whether stage 2 keeps this group's gradients as one flat piece and not each by itself."""
    return bool(zero._use_compact_grad_partition_buffer(group))


def forget_arrivals(zero: Any) -> None:
    """Forget which gradients have come to the host; stages 1 and 2 note that in another set than stage 3."""
    for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
        if hasattr(zero, name):
            setattr(zero, name, set())


# --- pieces --------------------------------------------------------------------------------------


def in_order(zero: Any, group: int) -> Iterator[tuple[Any, int]]:
    """Stages 1 and 2: the parameters of a group, and where each begins in the group's flat tensor."""
    yield from zip(zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group], strict=True)


def whole_groups(zero: Any) -> list[Any]:
    """Stages 1 and 2: each group's parameters in one flat tensor, which they are views of."""
    groups: list[Any] = zero.bit16_groups_flat
    return groups


def let_go_of_whole(zero: Any) -> None:
    """Stage 3: release gathered parameters."""
    zero._partition_all_parameters()


def is_on_disk(zero: Any, group: int) -> bool:
    """Whether stage 3 keeps this group's flat piece and optimizer state on the disk."""
    return bool(zero._swappable_optimizer_subgroup(group))


def read_from_disk(zero: Any, group: int) -> None:
    zero._optimizer_states_and_gradient_swap_in(group)


def write_to_disk(zero: Any, group: int) -> None:
    """Write what was read, and release its memory."""
    zero._optimizer_states_and_gradient_swap_out(group)


def leave_on_disk(zero: Any, group: int) -> None:
    """Release what was read without writing it, as it was not changed."""
    zero._release_swap_buffers(group)
