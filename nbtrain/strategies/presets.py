"""Presets: well-known names for a strategy together with some of its options.

An option that is typed beats a preset's. `single`, `ddp` and so on are no presets: they are names of strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base import humanize
from nbtrain.machine import registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What one name stands for."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """the strategy's own, by field"""
    start: str | None = None
    """how ranks are started; None: as without a preset"""
    asks: str = ""
    """options that have to be typed with it, as only the user knows them"""

    @property
    def line(self) -> str:
        """The line that it stands for, with what it asks for: `-s deepspeed --stage 2`."""
        start = "" if self.start is None else f"--start {self.start}"
        return " ".join(filter(None, [f"-s {self.strategy}", humanize.flags(self.options), start, self.asks]))


def _preset(strategy: str, asks: str = "", **options: Any) -> Preset:
    return Preset(strategy=strategy, options=options, asks=asks)


PRESETS: Mapping[str, Preset] = {
    "ddp_spawn": Preset(strategy="ddp", start="spawn"),
    "ddp_fork": Preset(strategy="ddp", start="fork"),
    "ddp_notebook": Preset(strategy="ddp", start="fork"),
    "ddp_sharded": _preset("sharded"),
    "deepspeed_stage_1": _preset("deepspeed", stage=1),
    "deepspeed_stage_2": _preset("deepspeed", stage=2),
    "deepspeed_stage_2_offload": _preset("deepspeed", stage=2, offload_optimizer="cpu"),
    "deepspeed_stage_3": _preset("deepspeed", stage=3),
    "deepspeed_stage_3_offload": _preset("deepspeed", stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    "deepspeed_stage_3_offload_nvme": _preset(
        "deepspeed",
        "--nvme-path DIR --precision bf16-true",
        stage=3,
        offload_optimizer="nvme",
        offload_parameters="nvme",
    ),
    "fsdp_cpu_offload": _preset("fsdp", cpu_offload=True),
    "fsdp_shard_grad_op": _preset("fsdp", sharding="SHARD_GRAD_OP"),
    "fsdp_hybrid": _preset("fsdp", "--replicas N", sharding="HYBRID_SHARD"),
    "tpu": _preset("xla"),
    "sequential": _preset("pipeline"),
}


def find(name: str) -> Preset | None:
    """The preset of this name, if there is its strategy."""
    preset = PRESETS.get(name)
    return preset if preset is not None and preset.strategy in registry.STRATEGIES else None


def names() -> list[str]:
    return [name for name in PRESETS if find(name) is not None]
