"""A Trainer's arguments that say where and how it runs, as a line of `%%distributed`. Old spellings are understood, and
answered with today's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from nbtrain.errors import NotSupported, UsageError
from nbtrain.magics.line.suggestions import similar
from nbtrain.strategies.base import Strategy
from nbtrain.trainer import strategies
from nbtrain.trainer.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from nbtrain.trainer.callbacks import __all__ as known
from nbtrain.trainer.module import LIGHTNING
from nbtrain.trainer.strategies import StrategyLine

WAS_STRATEGY = {
    "ddp": "ddp", "ddp_cpu": "ddp", "ddp_spawn": "ddp_spawn", "ddp2": "ddp2", "dp": "dp", "horovod": "horovod",
    "ddp_sharded": "ddp_sharded", "ddp_sharded_spawn": "ddp_sharded", "ddp_spawn_sharded": "ddp_sharded",
    "sharded": "sharded", "deepspeed": "deepspeed", "fsdp": "fsdp", "ddp_fully_sharded": "fsdp",
}  # fmt: skip
"""what `accelerator=`, `distributed_backend=` and `plugins=` named once → strategy"""
TODAYS = {
    "auto": "auto", "single_device": "single", "fsdp_native": "fsdp",
    "fsdp_native_full_shard_offload": "fsdp_cpu_offload",
    "ddp_fork_find_unused_parameters_false": "ddp", "ddp_notebook_find_unused_parameters_false": "ddp",
    "single_tpu": "xla", "xla": "xla", "sharded_ddp": "sharded", "sharded_ddp_spawn": "sharded",
} | WAS_STRATEGY  # fmt: skip
UNUSED = re.compile("[_]find_unused_parameters_(true|false)$")
PRECISIONS = {"32": "32", "32-true": "32", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
OF_NO_USE = {
    "amp_level", "amp_backend", "weights_summary", "progress_bar_refresh_rate", "process_position",
    "prepare_data_per_node", "terminate_on_nan", "log_gpu_memory", "move_metrics_to_cpu", "multiple_trainloader_mode",
    "barebones", "inference_mode", "enable_model_summary", "enable_autolog_hparams", "model_registry",
}  # fmt: skip
"""arguments that ask for what is so without them, or for what a notebook has its own of"""


NOT_THERE = {
    "reload_dataloaders_every_n_epochs": "loaders are asked for once in a fit. Call fit once for each epoch, and "
    "trainer.max_epochs += 1 before it",
    "track_grad_norm": "self.log('grad_norm', …) in on_before_optimizer_step",
}
LEAST = {"max_epochs": -1, "max_steps": -1, "num_sanity_val_steps": -1, "accumulate_grad_batches": 1,
         "check_val_every_n_epoch": 1}  # fmt: skip
AT_LEAST = {"max_epochs": "; -1 is without end", "max_steps": "; -1 is without end",
            "accumulate_grad_batches": " from 1 on, or {first epoch: number}",
            "check_val_every_n_epoch": " from 1 on"}  # fmt: skip


@dataclass
class Arguments:
    """How `%%distributed` is called, and what has to be said about it."""

    line: str
    others: dict[str, Any]
    """arguments of the loop, by today's names"""
    named: dict[str, Any] = field(default_factory=dict)
    """objects of the notebook that the line names"""
    said: list[str] = field(default_factory=list)


def read(
    accelerator: Any, devices: Any, num_nodes: int, strategy: Any, precision: Any, plugins: Any, old: dict[str, Any],
    known: Iterable[str] = (),
) -> Arguments:  # fmt: skip
    """`old`: arguments that are not today's. `known`: the names of those that are."""
    found = Arguments("", {})
    accelerator, devices, strategy = _old_devices(found, accelerator, devices, strategy, old)
    for plugin in plugins if isinstance(plugins, list | tuple) else [plugins] if plugins is not None else []:
        strategy = _plugin(found, plugin)
    _old_others(found, old, known)
    if num_nodes and int(num_nodes) > 1:
        raise NotSupported(
            f"num_nodes={num_nodes}: nbtrain's ranks are processes of this machine. Leave it out, and count all of "
            "them in devices"
        )
    if isinstance(accelerator, str) and accelerator in WAS_STRATEGY:
        today = WAS_STRATEGY[accelerator]
        _say(found, f"accelerator={accelerator!r}", f"strategy={today!r}")
        strategy, accelerator = today, "cpu" if accelerator == "ddp_cpu" else "auto"
    # What is left open is as the notebook has it: by `%distributed --devices 4`, or auto.
    parts = ["--strategy", _strategy(found, strategy)] if strategy not in (None, "auto") else []
    if accelerator not in (None, "auto"):
        parts += ["--accelerator", str(accelerator)]
    if devices not in (None, "auto"):
        parts += ["--devices", _devices(devices)]
    if precision is not None:
        parts += ["--precision", PRECISIONS.get(str(precision), str(precision))]
    found.line = " ".join(parts)
    return found


def _devices(devices: Any) -> str:
    if isinstance(devices, str) and "," not in devices:
        devices = int(devices)
    if isinstance(devices, bool):
        raise UsageError("devices=True: how many? devices=2, devices=-1 for all, devices=[0, 2] for these")
    if isinstance(devices, int):
        return str(devices)
    ids = devices.split(",") if isinstance(devices, str) else list(devices)
    return "[" + ",".join(str(int(one)) for one in ids if str(one).strip()) + "]"


def _strategy(found: Arguments, strategy: Any) -> str:
    if isinstance(strategy, str):
        name, space, options = strategy.removeprefix("nbtrain_").partition(" ")
        name = UNUSED.sub("", name)
        return TODAYS.get(name, name) + space + options
    if isinstance(strategy, Strategy):
        found.named["trainer_strategy"] = strategy
        return "trainer_strategy"
    line = strategy if isinstance(strategy, StrategyLine) else strategies.of_lightning(strategy)
    found.named |= line.named
    return line.line


def _plugin(found: Arguments, plugin: Any) -> Any:
    if isinstance(plugin, str) and plugin in WAS_STRATEGY:
        _say(found, f"plugins={plugin!r}", f"strategy={WAS_STRATEGY[plugin]!r}")
        return WAS_STRATEGY[plugin]
    if isinstance(plugin, StrategyLine):
        _say(found, "plugins=…", repr(plugin))
        return plugin
    raise UsageError(
        f"plugins={plugin!r} is not there. A strategy is strategy='NAME', a precision precision='bf16-mixed'"
    )


def _old_devices(
    found: Arguments, accelerator: Any, devices: Any, strategy: Any, old: dict[str, Any]
) -> tuple[Any, Any, Any]:
    backend = old.pop("distributed_backend", None)
    if backend is not None:
        if backend not in WAS_STRATEGY:
            raise UsageError(f"distributed_backend={backend!r}: write strategy='ddp'")
        _say(found, f"distributed_backend={backend!r}", f"strategy={WAS_STRATEGY[backend]!r}")
        strategy = WAS_STRATEGY[backend]
    for name, kind in (("gpus", "gpu"), ("tpu_cores", "tpu"), ("num_processes", "cpu")):
        count = old.pop(name, None)
        if not count:
            continue
        if isinstance(count, str) and "," not in count:
            count = int(count)
            if not count and name == "gpus":  # "0" was the first one
                count = [0]
        _say(found, f"{name}={count!r}", f"accelerator={kind!r}, devices={count!r}")
        if name == "num_processes" and devices not in (None, "auto"):
            continue
        devices = count
        accelerator = accelerator if accelerator in WAS_STRATEGY else kind
        if accelerator in WAS_STRATEGY and accelerator != "ddp_cpu":
            _say(found, f"accelerator={accelerator!r}", f"strategy={WAS_STRATEGY[accelerator]!r}")
            strategy, accelerator = WAS_STRATEGY[accelerator], kind
    return accelerator, devices, strategy


def _old_others(found: Arguments, old: dict[str, Any], known: Iterable[str]) -> None:
    for name, finder in (("auto_lr_find", LearningRateFinder), ("auto_scale_batch_size", BatchSizeFinder)):
        if how := old.pop(name, None):
            named: dict[str, Any] = {"attr_name": how} if name == "auto_lr_find" and isinstance(how, str) else {}
            _say(found, f"{name}={how!r}", f"callbacks=[{finder.__name__}()]")
            found.others.setdefault("more_callbacks", []).append(finder(**named))
    if (sampler := old.pop("replace_sampler_ddp", None)) is not None:
        _say(found, f"replace_sampler_ddp={sampler}", f"use_distributed_sampler={sampler}")
        found.others["use_distributed_sampler"] = sampler
    if (path := old.pop("resume_from_checkpoint", None)) is not None:
        _say(found, "resume_from_checkpoint=…", f"trainer.fit(module, ckpt_path={str(path)!r})")
        found.others["resume_from"] = str(path)
    if (callback := old.pop("checkpoint_callback", None)) is not None:
        if isinstance(callback, bool):
            _say(found, f"checkpoint_callback={callback}", f"enable_checkpointing={callback}")
            found.others["enable_checkpointing"] = callback
        else:
            _say(found, "checkpoint_callback=…", "callbacks=[…]")
            found.others.setdefault("more_callbacks", []).append(callback)
    for name in OF_NO_USE & old.keys():
        del old[name]
    if old:
        name = next(iter(old))
        if name in NOT_THERE:
            raise NotSupported(f"Trainer({name}=…) is not there: {NOT_THERE[name]}")
        raise UsageError(f"Trainer has no argument {name!r}{similar(name, known)}")


def _say(found: Arguments, old: str, today: str) -> None:
    found.said.append(f"{old} is written {today} today")


def check_numbers(given: Mapping[str, Any]) -> None:
    """The numbers among a Trainer's arguments, before anything is started with them."""
    for name, value in given.items():
        if value is None:
            continue
        value = value.item() if hasattr(value, "item") and not hasattr(value, "__len__") else value  # of numpy
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name.startswith("limit_") or name == "overfit_batches":
            if not is_number or value < 0 or (isinstance(value, float) and value > 1):
                raise UsageError(
                    f"{name}={value!r}: a number of batches (10), or the part of them that counts (0.1; 1.0 is all)"
                )
        elif name == "val_check_interval":
            if not is_number or value <= 0 or (isinstance(value, float) and value > 1):
                raise UsageError(f"{name}={value!r}: every so many batches (100), or a part of an epoch (0.25)")
        elif name == "gradient_clip_val":
            if not is_number or value < 0:
                raise UsageError(f"{name}={value!r}: a number, 1.0")
        elif not is_number or isinstance(value, float) or value < LEAST.get(name, 0):
            raise UsageError(f"{name}={value!r}: a whole number{AT_LEAST.get(name, '')}")
    if "check_val_every_n_epoch" in given and given["check_val_every_n_epoch"] is None:
        every = given.get("val_check_interval")
        if every is None or isinstance(getattr(every, "item", lambda: every)(), float):
            raise UsageError(
                f"check_val_every_n_epoch=None counts batches over epochs, and val_check_interval={every!r} is no "
                "number of batches: val_check_interval=100"
            )


def loggers_of(given: Any) -> list[Any]:
    if given is None or isinstance(given, bool):
        return []
    found = list(given) if isinstance(given, list | tuple) else [given]
    for one in found:
        if not hasattr(one, "log_metrics"):
            raise UsageError(
                f"logger={type(one).__name__}: a logger has log_metrics(metrics, step). A writer of TensorBoard or "
                "a run of W&B is given to %distributed --log-to NAME, which gets all that is drawn"
            )
    return found


def callbacks_of(callbacks: Any, more: list[Any], enable_checkpointing: bool | None) -> list[Any]:
    found = [
        *(callbacks if isinstance(callbacks, list | tuple) else [callbacks] if callbacks is not None else []),
        *more,
    ]
    for one in found:
        if isinstance(one, type):
            raise UsageError(f"callbacks=[{one.__name__}] is a class: write callbacks=[{one.__name__}(…)]")
        if type(one).__module__.startswith(LIGHTNING):
            raise UsageError(
                f"{type(one).__name__} of Lightning asks for Lightning's Trainer. In nbtrain.trainer.callbacks are "
                f"{', '.join(known)}; or take Lightning's own L.Trainer(strategy='nbtrain_ddp')"
            )
    has_one = any(isinstance(one, ModelCheckpoint) for one in found)
    if enable_checkpointing is False and has_one:
        raise UsageError("enable_checkpointing=False, and there is a ModelCheckpoint among the callbacks: which one?")
    if enable_checkpointing is not False and not has_one:
        found.append(ModelCheckpoint())
    return found


def seconds_of(given: Any) -> float | None:
    """Of a timedelta, "DD:HH:MM:SS", or what timedelta takes."""
    if given is None:
        return None
    if isinstance(given, str) and re.fullmatch(r"\d+:\d+:\d+:\d+", given):
        days, hours, minutes, seconds = map(int, given.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if isinstance(given, dict) and given.keys() <= {"weeks", "days", "hours", "minutes", "seconds"}:
        return timedelta(**given).total_seconds()
    if isinstance(given, timedelta):
        return given.total_seconds()
    raise UsageError(f'max_time={given!r}: {{"hours": 1, "minutes": 30}}, "00:01:30:00" (days first) or a timedelta')
