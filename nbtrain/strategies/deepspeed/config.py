"""From the user's options to the dict that DeepSpeed is configured with.

Who decides, the first one that speaks: a flag that is not at its default; `--config` (a dict of the notebook, or a JSON
file); the file that the environment variable NBTRAIN_DEEPSPEED_CONFIG (or Lightning's
PL_DEEPSPEED_CONFIG_PATH) names; our defaults, below. A flag that is not at
its default and a config that says otherwise is a contradiction and refused, as is a `--precision` that the config
contradicts: nobody should have to know who wins. (A flag that is written out but says its default cannot be told from
one that was left out: the config decides, and `decided` says so.) Values of "auto", as in the configs of transformers,
count as not given.

What nbtrain decides itself and takes no word on: batch sizes (the loader's), accumulation (the loop's, or
`--accumulate`), stage 0 (it is `ddp`, and DeepSpeed's takes no plain `loss.backward()`).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nbtrain.base.errors import NotSupported, UsageError

ENVIRONMENT = "NBTRAIN_DEEPSPEED_CONFIG"
LIGHTNING = "PL_DEEPSPEED_CONFIG_PATH"
"""the variable of Lightning's, which scripts have set already"""
OLDER = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
"""keys of zero_optimization that were true or false once → the sections of today"""

Settings = dict[str, Any]

FLAGS: Mapping[str, tuple[str, ...]] = {
    "stage": ("zero_optimization", "stage"),
    "offload_optimizer": ("zero_optimization", "offload_optimizer", "device"),
    "offload_parameters": ("zero_optimization", "offload_param", "device"),
    "allgather_bucket_size": ("zero_optimization", "allgather_bucket_size"),
    "reduce_bucket_size": ("zero_optimization", "reduce_bucket_size"),
    "overlap_comm": ("zero_optimization", "overlap_comm"),
    "contiguous_gradients": ("zero_optimization", "contiguous_gradients"),
    "partition_activations": ("activation_checkpointing", "partition_activations"),
    "cpu_checkpointing": ("activation_checkpointing", "cpu_checkpointing"),
}
"""field of the options → where DeepSpeed has it"""

PERSISTENT = 10_000
"""Elements up to which stage 3 leaves a parameter whole: biases and norms. (DeepSpeed's own: 100,000, which would leave
every layer of a small model whole.)"""

OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "wall_clock_breakdown", "dump_state")
"""Keys of a config that say nothing here."""

CANNOT: Mapping[str, str] = {
    "tensor_parallel": "tensor parallelism",
    "sequence_parallel_size": "sequence parallelism",
    "hybrid_engine": "the hybrid engine",
    "amp": "apex",
    "data_efficiency": "DeepSpeed's own loaders",
    "curriculum_learning": "DeepSpeed's own loaders",
    "compression_training": "compression",
    "autotuning": "autotuning, which starts processes of its own",
}

_PRECISIONS = {"bf16": "bf16-true", "fp16": "16-true"}


def given(config: Any) -> Settings:
    """What `--config`, or else the environment, says; nothing is changed in the user's dict."""
    source = "--config"
    if config is None:
        source = ENVIRONMENT if os.environ.get(ENVIRONMENT) else LIGHTNING
        config = os.environ.get(source) or {}
    if isinstance(config, str | os.PathLike):
        path = Path(config).expanduser()
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise UsageError(
                f"{source} {path}: {error.strerror}; it takes a dict of the notebook or a JSON file"
            ) from None
        except ValueError as error:
            raise UsageError(f"{source} {path}: this is not JSON ({error})") from None
    if not isinstance(config, Mapping):
        raise UsageError(f"{source} takes a dict or the name of a JSON file, not {type(config).__name__}")
    settings = _without_auto(config)
    _translate(settings.get("zero_optimization"))
    _check(settings, source)
    return settings


def build(options: Any, precision: str | None = None) -> tuple[Settings, str]:
    """The whole config, and the precision that it means. None: it is not known yet."""
    said = given(options.config)
    known = precision is not None
    precision = _precision(said, precision or "32")
    stage = said.get("zero_optimization", {}).get("stage", options.stage)
    settings = _defaults(stage)
    for name, path in FLAGS.items():
        value = getattr(options, name)
        if name.startswith("offload") and value == "none":
            continue
        if name == "overlap_comm" and not value:
            continue  # DeepSpeed knows when it is of use
        _put(settings, path, value)
    _merge(settings, said)
    for option in fields(options):
        value = getattr(options, option.name)
        if option.name not in FLAGS or value == option.default:
            continue
        path = FLAGS[option.name]
        other = _get(said, path)
        if other is not None and other != value:
            raise UsageError(
                f"--{option.name.replace('_', '-')} {value}, but the config says {'.'.join(path)} = {other!r}: "
                "leave one of them out"
            )
        _put(settings, path, value)
    if precision in ("bf16-true", "16-true"):
        _put(settings, ("bf16" if precision == "bf16-true" else "fp16", "enabled"), True)
    if precision == "16-true":
        settings["fp16"]["loss_scale"] = 1.0  # the scale is ours, as in 16-mixed
    _check_stage(settings, options.nvme_path, precision if known else "bf16-true")
    return settings, precision


def decided(options: Any) -> str | None:
    """A line for the user, of what stays at its default among the flags and is otherwise in the config."""
    said = given(options.config)
    flags = []
    for option in fields(options):
        value = _get(said, FLAGS[option.name]) if option.name in FLAGS else None
        if value is not None and getattr(options, option.name) == option.default != value:
            flag = option.name.replace("_", "-")
            flags.append(f"--{flag} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{flag}")
    return f"from the config: {', '.join(flags)}" if flags else None


def offload(settings: Settings, what: str) -> str:
    """Where it goes: `cpu`, `nvme` or `none`."""
    section = settings["zero_optimization"].get(what) or {}
    return str(section.get("device", "none"))


def _defaults(stage: int) -> Settings:
    zero: Settings = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # DeepSpeed's own default clips at 1.0
        "managed_gradient_accumulation": False,  # every step() of the loop is one
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def _translate(zero: Any) -> None:
    """Older keys mean what they meant."""
    if not isinstance(zero, dict):
        return
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for old, new in OLDER.items():
        if zero.pop(old, False) and not zero.get(new):
            zero[new] = {"device": "cpu", **({} if pinned is None else {"pin_memory": pinned})}


def _check(settings: Settings, source: str) -> None:
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise UsageError(f"{source}: zero_optimization must be a dict, not {zero!r}")
    if zero.get("stage") == 0:
        raise UsageError(f"{source}: stage 0 shards nothing; that is the strategy ddp. Stages are 1, 2 and 3")
    if settings.get("gradient_accumulation_steps", 1) != 1:
        raise UsageError(
            f"{source}: gradient_accumulation_steps = {settings['gradient_accumulation_steps']}: here the loop decides "
            "when a step is taken; leave it out and write --accumulate K, or accumulate in the loop"
        )
    if settings.get("managed_gradient_accumulation"):
        raise UsageError(f"{source}: managed_gradient_accumulation: here the loop decides when a step is taken")
    for name, what in CANNOT.items():
        section = settings.get(name)
        if section and not (isinstance(section, Mapping) and section.get("enabled") is False):
            raise NotSupported(f"{source}: {name}: {what} is not possible in a plain training loop")
    if zero.get("zenflow"):
        raise NotSupported(f"{source}: zero_optimization.zenflow is not possible in a plain training loop")
    kind = str(settings.get("optimizer", {}).get("type", ""))
    if kind.lower().replace("_", "").startswith(("onebit", "zeroone")):
        raise NotSupported(
            f"{source}: {kind}: 1-bit optimizers do not go together with ZeRO, and stages 1 to 3 are ZeRO; newer "
            "DeepSpeed versions have removed them. Take Adam, or the strategy ddp"
        )
    for name in OURS:
        settings.pop(name, None)
    settings.pop("gradient_accumulation_steps", None)
    settings.pop("managed_gradient_accumulation", None)


def _precision(said: Settings, precision: str) -> str:
    """The config may say it as well."""
    for name, meant in _PRECISIONS.items():
        enabled = said.get(name, {}).get("enabled")
        if enabled and precision not in ("32", meant):
            raise UsageError(f"--precision {precision}, but the config has {name}.enabled: leave one of them out")
        if enabled is False and precision == meant:
            raise UsageError(
                f"--precision {precision}, but the config has {name}.enabled = false: leave one of them out"
            )
        if enabled:
            return meant
    if said.get("torch_autocast", {}).get("enabled") and precision != "32":
        raise UsageError(f"--precision {precision}, but the config has torch_autocast.enabled: leave one of them out")
    return precision


def _check_stage(settings: Settings, nvme_path: str, precision: str) -> None:
    stage = settings["zero_optimization"]["stage"]
    if stage not in (1, 2, 3):
        raise UsageError(f"stage {stage!r}: stages are 1, 2 and 3")
    if stage == 1 and settings["zero_optimization"].get("overlap_comm"):
        raise UsageError(
            "--overlap-comm needs --stage 2 or 3: stage 1 sends gradients when the step is taken, and no backward goes "
            "on then"
        )
    parameters, optimizer = offload(settings, "offload_param"), offload(settings, "offload_optimizer")
    if parameters != "none" and stage != 3:
        raise UsageError(
            f"--offload-parameters {parameters} needs --stage 3: under stage {stage} every rank has them whole"
        )
    if optimizer == "nvme" and stage != 3:
        raise UsageError("--offload-optimizer nvme needs --stage 3; stages 1 and 2 can offload it to cpu")
    if parameters == "nvme" and precision != "bf16-true":
        raise UsageError(
            "--offload-parameters nvme needs --precision bf16-true: DeepSpeed reads parameters back in 16 bits"
        )
    if "nvme" in (parameters, optimizer):
        sections = [settings["zero_optimization"].get(name) or {} for name in ("offload_param", "offload_optimizer")]
        if not (nvme_path or any(section.get("nvme_path") for section in sections)):
            raise UsageError("offloading to nvme needs to know where: --nvme-path DIR")
    if parameters == "nvme":  # with prefetching its buffers are given out twice
        settings["zero_optimization"]["stage3_prefetch_bucket_size"] = 0


def _without_auto(config: Mapping[str, Any]) -> Settings:
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for name, value in config.items()
        if value != "auto"
    }


def _merge(settings: Settings, other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, Mapping) and isinstance(settings.get(name), dict):
            _merge(settings[name], value)
        else:
            settings[name] = copy.deepcopy(value)


def _get(settings: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name in path[:-1]:
        settings = settings.get(name) or {}
    return settings.get(path[-1])


def _put(settings: Settings, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(settings.get(name), dict):
            settings[name] = {}
        settings = settings[name]
    settings[path[-1]] = value


def sections(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The offload sections that go to a disk."""
    for name in ("offload_param", "offload_optimizer"):
        if offload(settings, name) == "nvme":
            yield name, settings["zero_optimization"][name]
