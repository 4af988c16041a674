"""`deepspeed`: DeepSpeed's ZeRO behind the plain loop. Each rank sees a share of the batches and keeps a share of what
training needs: of the optimizer's state (stage 1), of the gradients too (2), and of the parameters too (3).

The loop, the model, the optimizer and its schedulers stay the user's own; `optimizer.step()` is a step of DeepSpeed's
engine. Where a config makes the optimizer, that one trains, with the learning rates of the config: the user's optimizer
object is then the handle whose `step()` it is, its state is left as it was, and the state of the config's stays on the
ranks. A scheduler from the config moves the learning rates of the user's groups, and those come home.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from nbtrain.base.errors import UsageError
from nbtrain.strategies.base import Component, Facts, Prepared, Strategy
from nbtrain.strategies.deepspeed import config
from nbtrain.strategies.deepspeed.estimate import estimate
from nbtrain.strategies.deepspeed.loss_scale import LossScale
from nbtrain.strategies.memory_estimate import Estimate, Profile, World

PRECISIONS = ("32", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


class DeepSpeed(Strategy):
    """ZeRO, stages 1 to 3."""

    facts = Facts(own_precision=True)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        stage: int = 2
        """1: the optimizer's state is sharded; 2: gradients too; 3: parameters too"""
        offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
        """where the optimizer's state and its step are: nvme needs stage 3"""
        offload_parameters: Literal["none", "cpu", "nvme"] = "none"
        """where parameters wait until a layer needs them: stage 3; nvme needs --precision bf16-true"""
        nvme_path: str = ""
        """the folder for what goes to nvme; the files are deleted afterwards"""
        allgather_bucket_size: int = 50_000_000
        """elements that are gathered at once after a step (stages 1 and 2)"""
        reduce_bucket_size: int = 50_000_000
        """elements of gradients that are reduced at once"""
        overlap_comm: bool = False
        """gradients are reduced while the backward goes on, in stages 2 and 3; off: DeepSpeed decides by stage"""
        contiguous_gradients: bool = True
        """gradients are copied into one buffer as they come"""
        partition_activations: bool = False
        """deepspeed.checkpointing.checkpoint keeps a share of each activation per model parallel rank"""
        cpu_checkpointing: bool = False
        """deepspeed.checkpointing.checkpoint keeps activations in the host's memory; needs a GPU"""
        config: Any = None
        """a DeepSpeed config: a dict of the notebook or a JSON file; else the file NBTRAIN_DEEPSPEED_CONFIG names"""

        def __post_init__(self) -> None:
            if self.stage == 0:
                raise UsageError("--stage 0 shards nothing: that is the strategy ddp. Stages are 1, 2 and 3")
            if self.stage not in (1, 2, 3):
                raise UsageError(f"--stage {self.stage}: stages are 1, 2 and 3")
            for name in ("allgather_bucket_size", "reduce_bucket_size"):
                size = getattr(self, name)
                if size <= 0 or size % 2:
                    raise UsageError(
                        f"--{name.replace('_', '-')} {size}: it is an even number of elements; 50000000 is usual"
                    )
            config.build(self)

    def __init__(self, options: Any = None, **given: Any) -> None:
        super().__init__(options, **given)
        self.scale = LossScale()
        if self.options.stage == 3:
            self.facts = replace(self.facts, empty_weights="hollow")

    def estimate(self, profile: Profile, world: World) -> Estimate:
        return estimate(self.options, profile, world)

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError("the strategy deepspeed needs ranks: write --devices 2, or --strategy single for one")
        from nbtrain.strategies.deepspeed.engine import EngineComponent
        from nbtrain.strategies.kit.gradient_average import GradientAverage
        from nbtrain.strategies.kit.replicated import Averaged

        settings, precision = config.build(self.options, precision)
        device = next((p.device for p in component.parameters()), torch.device("cpu"))
        if precision.startswith("16") and device.type == "cpu":
            raise UsageError(
                f"--precision {precision}: DeepSpeed has no half precision on the CPU; take bf16-mixed or bf16-true"
            )
        if device.type == "cpu" and (settings.get("activation_checkpointing") or {}).get("cpu_checkpointing"):
            raise UsageError("--cpu-checkpointing moves activations from a GPU to the host; here all is on the host")
        if not component.optimizers:
            # A teacher, or a model that is only evaluated: nothing to shard, kept whole on every rank. Should the cell
            # train it by hand, its gradients are averaged as under ddp.
            return Averaged(component, GradientAverage(component.parameters()))
        folder = os.path.abspath(os.path.expanduser(self.options.nvme_path)) if self.options.nvme_path else ""
        prepared = EngineComponent(component, settings, precision, self.scale, folder)
        if note := config.decided(self.options):
            prepared.notes.append(note)
        return prepared
