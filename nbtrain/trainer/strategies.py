"""Lightning's objects for strategies, for those without Lightning: `Trainer(strategy=FSDPStrategy(cpu_offload=True))`.

Each is a line of options, as behind `%%distributed --strategy`. Lightning's own objects are read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nbtrain import humanize
from nbtrain.errors import UsageError

TOLD_BY_ITSELF = {
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "process_group_backend", "timeout",
    "start_method", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "logging_level", "logging_batch_size_per_gpu", "use_orig_params", "sync_module_states", "device_mesh",
}  # fmt: skip
"""arguments that say what is so here without a word, or how processes are started"""


class StrategyLine:
    """A strategy, its options, and objects of the notebook that they name."""

    def __init__(self, strategy: str, options: dict[str, Any] | None = None, **named: Any) -> None:
        self.line = " ".join(filter(None, [strategy, humanize.flags(options or {})]))
        self.named = named

    def __repr__(self) -> str:
        return f"strategy={self.line!r}"


def DDPStrategy(**given: Any) -> StrategyLine:
    _refuse_unknown("DDPStrategy", given, ())
    return StrategyLine("ddp")


def DDPShardedStrategy(**given: Any) -> StrategyLine:
    _refuse_unknown("DDPShardedStrategy", given, ("reduce_buffer_size",))
    return StrategyLine("sharded")


def FSDPStrategy(
    *,
    sharding_strategy: Any = "FULL_SHARD",
    cpu_offload: Any = False,
    auto_wrap_policy: Any = None,
    activation_checkpointing_policy: Any = None,
    limit_all_gathers: bool = True,
    state_dict_type: str = "full",
    mixed_precision: Any = None,
    **given: Any,
) -> StrategyLine:
    """`state_dict_type` needs no answer: a checkpoint is loaded by any strategy."""
    _refuse_unknown("FSDPStrategy", given, ())
    if mixed_precision is not None:
        raise UsageError("FSDPStrategy(mixed_precision=…): write Trainer(precision='bf16-mixed')")
    options: dict[str, Any] = {}
    name = getattr(sharding_strategy, "name", str(sharding_strategy))
    if name != "FULL_SHARD":
        options["sharding"] = name
    if getattr(cpu_offload, "offload_params", cpu_offload):
        options["cpu_offload"] = True
    named: dict[str, Any] = {}
    if auto_wrap_policy is not None:
        options["wrap"], named = _classes_or_name(auto_wrap_policy, "trainer_wrap")
    line = StrategyLine("fsdp", options, **named)
    if not limit_all_gathers:
        line.line += " --no-limit-all-gathers"
    if activation_checkpointing_policy is not None:
        classes, _ = _classes_or_name(activation_checkpointing_policy, "")
        line.line += f" --checkpoint-activations {classes}"
    return line


def DeepSpeedStrategy(
    *,
    stage: int = 2,
    config: Any = None,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    cpu_offload: bool = False,
    offload_params_device: str = "cpu",
    offload_optimizer_device: str = "cpu",
    nvme_path: str = "",
    remote_device: str | None = None,
    zero_optimization: bool = True,
    **given: Any,
) -> StrategyLine:
    """Numbers of DeepSpeed's own (buckets, overlap) go on to it; `config` is its JSON, as a path or a dict."""
    passed = ("allgather_bucket_size", "reduce_bucket_size", "overlap_comm", "contiguous_gradients",
              "partition_activations", "cpu_checkpointing")  # fmt: skip
    _refuse_unknown("DeepSpeedStrategy", given, passed)
    if config is not None:
        if isinstance(config, str):
            return StrategyLine("deepspeed", {"config": config})
        return StrategyLine("deepspeed --config trainer_config", trainer_config=config)
    if not zero_optimization:
        return StrategyLine("ddp")
    options: dict[str, Any] = {"stage": stage}
    if offload_optimizer or cpu_offload:
        options["offload_optimizer"] = offload_optimizer_device
    if offload_parameters or (remote_device and stage == 3):
        options["offload_parameters"] = offload_params_device
    if nvme_path:
        options["nvme_path"] = nvme_path
    options |= {name: value for name, value in given.items() if name in passed}
    return StrategyLine("deepspeed", options)


def RPCSequentialStrategy(*, balance: Iterable[int] = (), microbatches: int = 0, **given: Any) -> StrategyLine:
    _refuse_unknown("RPCSequentialStrategy", given, ("chunks", "checkpoint", "balance_mode"))
    options: dict[str, Any] = {}
    if balance:
        options["balance"] = ",".join(map(str, balance))
    if microbatches or given.get("chunks"):
        options["microbatches"] = microbatches or given["chunks"]
    return StrategyLine("pipeline", options)


BY_NAME: dict[str, Callable[..., StrategyLine]] = {
    **dict.fromkeys(("DDPStrategy", "DDPPlugin", "DDPSpawnPlugin", "DDP2Plugin", "DDPSpawnStrategy"), DDPStrategy),
    **dict.fromkeys(
        ("DDPShardedStrategy", "DDPShardedPlugin", "DDPSpawnShardedPlugin", "DDPSpawnShardedStrategy"),
        DDPShardedStrategy,
    ),
    **dict.fromkeys(("FSDPStrategy", "DDPFullyShardedNativeStrategy", "DDPFullyShardedPlugin"), FSDPStrategy),
    **dict.fromkeys(("DeepSpeedStrategy", "DeepSpeedPlugin"), DeepSpeedStrategy),
    **dict.fromkeys(("RPCSequentialStrategy", "RPCSequentialPlugin"), RPCSequentialStrategy),
}
"""Every name that Lightning's documentation has had → the one that reads its arguments"""
globals().update(BY_NAME)


def of_lightning(strategy: Any) -> StrategyLine:
    """An object of Lightning's own, as a line."""
    name = type(strategy).__name__
    if name in ("SingleDeviceStrategy", "DDPStrategy"):
        return StrategyLine("single" if name == "SingleDeviceStrategy" else "ddp")
    if name == "FSDPStrategy":
        kwargs = dict(getattr(strategy, "kwargs", {}))
        return FSDPStrategy(
            sharding_strategy=strategy.sharding_strategy,
            cpu_offload=strategy.cpu_offload,
            auto_wrap_policy=kwargs.get("auto_wrap_policy"),
            mixed_precision=strategy.mixed_precision,
            limit_all_gathers=kwargs.get("limit_all_gathers", True),
        )
    if name == "DeepSpeedStrategy":
        return DeepSpeedStrategy(config=strategy.config)  # what it was given, as DeepSpeed's own JSON
    raise UsageError(
        f"strategy={name}(…) is not among nbtrain's. Write the name of one, with options: strategy='fsdp --wrap Block'"
    )


def _classes_or_name(policy: Any, name: str) -> tuple[str, dict[str, Any]]:
    if isinstance(policy, set | frozenset | list | tuple):
        return ",".join(sorted(one.__name__ for one in policy)), {}
    if isinstance(policy, type):
        return policy.__name__, {}
    return name, {name: policy}


def _refuse_unknown(name: str, given: dict[str, Any], more: Iterable[str]) -> None:
    unknown = given.keys() - TOLD_BY_ITSELF - set(more)
    if unknown:
        raise UsageError(
            f"{name}({sorted(unknown)[0]}=…) is not there. What is: strategy='NAME --option value', with the options "
            "of %distributed strategies"
        )
