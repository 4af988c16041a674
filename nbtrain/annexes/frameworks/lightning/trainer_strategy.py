"""A strategy for Lightning's Trainer that leaves the distributing to nbtrain's own: the module stays as it is, and the
cell in which the Trainer runs is one of `-s NAME`."""

from __future__ import annotations

import builtins
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbtrain.annexes.frameworks.functions.run_cell import notebook, on_machines
from nbtrain.annexes.frameworks.lightning.cluster import Ranks, on_a_rank
from nbtrain.annexes.frameworks.lightning.launcher import OnWarmRanks
from nbtrain.annexes.frameworks.lightning.loaders import Evaluated
from nbtrain.annexes.frameworks.lightning.progress import runtime_here
from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat import lightning
from nbtrain.strategies.presets import PRESETS
from nbtrain.worker.data.batch_dealing import has_indices, shared_out
from nbtrain.worker.data.torchmetrics_sync import MetricsAlone

if TYPE_CHECKING:
    from nbtrain.annexes.frameworks.lightning.loaders import Dealing

PREFIX = "nbtrain_"
OURS = ("ddp", "dp", "ddp2", "zero1", "sharded", "fsdp", "deepspeed", "horovod", "pipeline")
OTHER_STARTS = ("spawn", "fork", "notebook")
"""in the names of entries that say how processes are started: ours are there already"""
NOT_YET = (
    "nbtrain_{name}: nbtrain runs {ours} for Lightning so far. Make the Trainer with strategy='{name}' in a cell below "
    "%%distributed -s none, where Lightning does it all"
)
ELSEWHERE = (
    "strategy='nbtrain_{name}' is for an ordinary cell of a notebook, where nbtrain has ranks. In a script, and below "
    "%%distributed -s none, write Lightning's own: strategy='ddp' ('fsdp', 'deepspeed')"
)
ONE_MACHINE = (
    "num_nodes={nodes}: nbtrain has not been told where other machines are. Write %distributed --engine ssh --hosts "
    "a,b (or elastic, slurm, ray) in a cell before; on this machine leave num_nodes out, and count all devices"
)


class OnRanks:
    """What our strategy has before Lightning's ddp, whose barriers and reductions it uses as they are."""

    strategy_name = "nbtrain"
    every_strategy: Any
    """Lightning's class above its ddp"""
    dealing: Dealing | None = None
    """while it predicts on several ranks"""
    seen_by: int = 1
    """how many ranks have the same samples: all, while loaders are evaluated that every rank sees whole"""
    evaluates_shares = False
    """a loader that is evaluated has a sampler that gives each rank a share"""
    alone: MetricsAlone | None = None

    def __init__(self, runs: str = "ddp", **options: Any) -> None:
        """`runs`: the strategy or preset, and its options, as behind `%%distributed --strategy`."""
        super().__init__(**options)
        self.runs = runs

    def _configure_launcher(self: Any) -> None:
        if on_a_rank() or notebook() is None:  # what ranks are forked from begins to import while the user writes on
            raise UsageError(ELSEWHERE.format(name=self.runs.partition(" ")[0]))
        if self.num_nodes > 1 and not on_machines(f"--strategy {self.runs}"):
            raise NotSupported(ONE_MACHINE.format(nodes=self.num_nodes))
        self.cluster_environment = Ranks(self.num_nodes * self.num_processes)
        self._launcher = OnWarmRanks(self)

    @property
    def launcher(self: Any) -> OnWarmRanks | None:
        """On a rank there is nothing to launch."""
        return None if on_a_rank() else self._launcher

    @property
    def root_device(self: Any) -> torch.device:
        # a builtin of the ranks
        return torch.device(builtins.device) if on_a_rank() else self.parallel_devices[0]  # type: ignore[attr-defined]

    def setup_distributed(self: Any) -> None:
        """The ranks have formed their group, unless one process has all the devices."""
        if dist.is_initialized():
            super().setup_distributed()  # type: ignore[misc]  # the next class is Lightning's
        else:
            self.set_world_ranks()

    def setup(self: Any, trainer: Any) -> None:
        """What Lightning does under every strategy: gradients are averaged by nbtrain, without a wrapper around the
        module, and all ranks have the notebook's weights."""
        if trainer.state.fn == "fit":
            lightning.synchronize_norms(self)
        self.evaluates_shares = False
        self._samples_are_seen_by(self.world_size // runtime_here().loaders.deal.count)
        self.every_strategy.setup(self, trainer)

    def teardown(self) -> None:
        self._samples_are_seen_by(1)
        super().teardown()  # type: ignore[misc]  # the next class is Lightning's

    def _setup_model(self, model: Any) -> Any:
        return model

    def process_dataloader(self: Any, dataloader: Any) -> Any:
        if self.dealing is not None:
            self.dealing.deal(dataloader)
        elif not self.lightning_module.trainer.training:
            self.evaluates_shares = self.evaluates_shares or shared_out(dataloader)
            if has_indices(dataloader) and not shared_out(dataloader):
                return Evaluated(dataloader)
        return super().process_dataloader(dataloader)  # type: ignore[misc]  # the next class is Lightning's

    # -- what several ranks have of the same samples: to add it up would count each sample several times --

    def _samples_are_seen_by(self: Any, ranks: int) -> None:
        if self.alone is not None:
            self.alone.end()
        self.seen_by, self.alone = ranks, None
        if ranks > 1:
            self.alone = MetricsAlone(self.lightning_module.modules(), ranks if ranks < self.world_size else None)

    def on_validation_start(self) -> None:
        self._begin_evaluation()

    def on_test_start(self) -> None:
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        self._end_evaluation()

    def on_test_end(self) -> None:
        self._end_evaluation()

    def _begin_evaluation(self: Any) -> None:
        self._seen_in_training = self.seen_by
        self._samples_are_seen_by(1 if self.evaluates_shares else self.world_size)

    def _end_evaluation(self) -> None:
        self._samples_are_seen_by(self._seen_in_training)

    def reduce(self: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.seen_by == self.world_size:
            return tensor
        # the next class is Lightning's
        reduced = super().reduce(tensor, group, reduce_op)  # type: ignore[misc]
        summed = self.seen_by > 1 and str(reduce_op).lower().endswith("sum")
        return reduced / self.seen_by if summed else reduced

    def all_gather(self: Any, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if self.seen_by == self.world_size:
            return tensor
        # the next class is Lightning's
        gathered_tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        if sync_grads and self.seen_by > 1:  # equal on these ranks, and each of them has its part of the gradient
            return gathered_tensor.unflatten(0, (-1, self.seen_by)).mean(1)
        return gathered_tensor[:: self.seen_by]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        before, self.seen_by = self.seen_by, 1  # what all ranks decide together stays so
        try:
            # the next class is Lightning's
            return bool(super().reduce_boolean_decision(decision, all))  # type: ignore[misc]
        finally:
            self.seen_by = before

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """All ranks come here, and rank 0 writes: what is in pieces has to be put together first."""
        # the next class is Lightning's
        super().save_checkpoint(whole(checkpoint), filepath, storage_options)  # type: ignore[misc]


def whole(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with whole weights, on rank 0. Collective."""
    from nbtrain.strategies.kit.saved_pieces import with_full_tensors
    from nbtrain.strategies.kit.stage_tensors import with_full_stage_tensors

    found: dict[str, Any] = with_full_tensors(with_full_stage_tensors(checkpoint), 0) if on_a_rank() else checkpoint
    return found


def on_ranks(theirs: Any, module: str) -> Any:
    """The strategy for one package of Lightning's: `theirs` is its ddp, and ours lives in `module`."""
    own = {"__module__": module, "__doc__": OnRanks.__doc__, "every_strategy": theirs.__bases__[0]}
    return type("Strategy", (OnRanks, theirs), own)


def register_all(registry: Any, strategy: Any) -> None:
    """Register it under `nbtrain_` and each name that nbtrain has for one, or Lightning."""
    known = {name: name for name in OURS} | {
        name: name
        for name, preset in PRESETS.items()
        if preset.strategy in OURS and preset.start is None and not preset.asks
    }
    known |= dict.fromkeys(("ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true"), "ddp")
    for name, ours in known.items():
        told = f"nbtrain's {ours}, on warm ranks"
        registry.register(PREFIX + name, strategy, description=told, override=True, runs=ours)
    for name in list(registry):
        if name.startswith(("single", PREFIX)) or name in known or any(word in name for word in OTHER_STARTS):
            continue
        registry.register(PREFIX + name, partial(_refuse, name), override=True)


def _refuse(name: str, **_: Any) -> None:
    raise NotSupported(NOT_YET.format(name=name, ours=", ".join(OURS)))
