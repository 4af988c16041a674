"""DeepSpeed."""

from __future__ import annotations

from nbtrain.compat.internals import Internals

its = Internals("deepspeed")
check = its.check

BUILD_SHM = "deepspeed.comm.torch.build_shm_op"
EMPTY_PARAMETER = "deepspeed.runtime.zero.partition_parameters.free_param"
CUT_TO_BLOCKS = "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper._adjust_for_misaligned_lengths"
SEND_WEIGHTS = "deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model"
SEND_WEIGHT = "deepspeed.runtime.zero.partition_parameters.Init._zero_init_param"
