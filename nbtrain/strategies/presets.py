"""Presets: names that people know for a strategy together with some of its options. Rows of data.

An option that is given beats a preset's. A preset can be used where its strategy can, and `single`, `ddp` and so on are
no presets: each strategy has its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain import humanize, registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What one name stands for."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """the strategy's own, by field"""
    start: str | None = None
    """how ranks come to be; None: as they do otherwise"""
    asks: str = ""
    """what has to be given with it, for nobody else can know"""

    @property
    def line(self) -> str:
        """The same, spelled out: `-s deepspeed --stage 2`; with what it asks for."""
        start = "" if self.start is None else f"--start {self.start}"
        return " ".join(filter(None, [f"-s {self.strategy}", humanize.flags(self.options), start, self.asks]))


def _deepspeed(asks: str = "", **options: Any) -> Preset:
    return Preset(strategy="deepspeed", options=options, asks=asks)


def _fsdp(asks: str = "", **options: Any) -> Preset:
    return Preset(strategy="fsdp", options=options, asks=asks)


PRESETS: Mapping[str, Preset] = {
    "ddp_spawn": Preset(strategy="ddp", start="spawn"),
    "ddp_fork": Preset(strategy="ddp", start="fork"),
    "ddp_notebook": Preset(strategy="ddp", start="fork"),
    "ddp_sharded": Preset(strategy="sharded"),
    "deepspeed_stage_1": _deepspeed(stage=1),
    "deepspeed_stage_2": _deepspeed(stage=2),
    "deepspeed_stage_2_offload": _deepspeed(stage=2, offload_optimizer="cpu"),
    "deepspeed_stage_3": _deepspeed(stage=3),
    "deepspeed_stage_3_offload": _deepspeed(stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    "deepspeed_stage_3_offload_nvme": _deepspeed(
        "--nvme-path DIR --precision bf16-true", stage=3, offload_optimizer="nvme", offload_parameters="nvme"
    ),
    "fsdp_cpu_offload": _fsdp(cpu_offload=True),
    "fsdp_shard_grad_op": _fsdp(sharding="SHARD_GRAD_OP"),
    "fsdp_hybrid": _fsdp("--replicas N", sharding="HYBRID_SHARD"),
    "tpu": Preset(strategy="xla"),
    "sequential": Preset(strategy="pipeline"),
}


def find(name: str) -> Preset | None:
    """The preset of this name, if there is its strategy."""
    preset = PRESETS.get(name)
    return preset if preset is not None and preset.strategy in registry.STRATEGIES else None


def names() -> list[str]:
    return [name for name in PRESETS if find(name) is not None]
