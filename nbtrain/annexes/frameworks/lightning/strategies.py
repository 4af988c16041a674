"""A strategy for Lightning's Trainer that leaves the distributing to nbtrain's own: the module stays as it is, and the
cell in which the Trainer runs is one of `-s NAME`."""

from __future__ import annotations

import builtins
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nbtrain.compat import lightning
from nbtrain.errors import NotSupported
from nbtrain.lightning.cluster import Ranks, on_a_rank
from nbtrain.lightning.launcher import OnWarmRanks
from nbtrain.lightning.loaders import Evaluated
from nbtrain.strategies.presets import PRESETS
from nbtrain.trainer.run_cell import notebook
from nbtrain.training.data.metrics_alone import MetricsAlone
from nbtrain.training.data.whole_batches import has_indices, has_share

if TYPE_CHECKING:
    from nbtrain.lightning.loaders import Dealing

PREFIX = "nbtrain_"
OURS = ("ddp", "zero1", "sharded", "fsdp", "deepspeed")
OTHER_STARTS = ("spawn", "fork", "notebook")
"""in the names of entries that say how processes are started: ours are there already"""
NOT_YET = (
    "nbtrain_{name}: nbtrain runs {ours} for Lightning so far. Make the Trainer with strategy='{name}' in a cell below "
    "%%distributed -s none, where Lightning does it all"
)
ONE_MACHINE = (
    "num_nodes={nodes}: nbtrain's ranks are processes of this machine. Leave it out, and count all of them in devices"
)


class OnRanks:
    """What our strategy has before Lightning's ddp, whose barriers and reductions it uses as they are."""

    strategy_name = "nbtrain"
    every_strategy: Any
    """Lightning's class above its ddp"""
    dealing: Dealing | None = None
    """while it predicts on several ranks"""
    has_all = False
    """while it evaluates loaders that every rank sees whole"""
    evaluates_shares = False
    """a loader that is evaluated has a sampler that gives each rank a share"""
    alone: MetricsAlone | None = None

    def __init__(self, runs: str = "ddp", **options: Any) -> None:
        """`runs`: the strategy or preset, and its options, as behind `%%distributed --strategy`."""
        super().__init__(**options)
        self.runs = runs

    def _configure_launcher(self: Any) -> None:
        if self.num_nodes > 1:
            raise NotSupported(ONE_MACHINE.format(nodes=self.num_nodes))
        if not on_a_rank():
            notebook()  # what ranks are forked from begins to import while the user writes on
        self.cluster_environment = Ranks(self.num_processes)
        self._launcher = OnWarmRanks(self)

    @property
    def launcher(self: Any) -> OnWarmRanks | None:
        """On a rank there is nothing to launch."""
        return None if on_a_rank() else self._launcher

    @property
    def root_device(self: Any) -> torch.device:
        # a builtin of the ranks
        return torch.device(builtins.device) if on_a_rank() else self.parallel_devices[0]  # type: ignore[attr-defined]

    def setup(self: Any, trainer: Any) -> None:
        """What Lightning does under every strategy: gradients are averaged by nbtrain, without a wrapper around the
        module, and all ranks have the notebook's weights."""
        if trainer.state.fn == "fit":
            lightning.synchronize_norms(self)
        self.has_all = self.evaluates_shares = False
        self.every_strategy.setup(self, trainer)

    def _setup_model(self, model: Any) -> Any:
        return model

    def process_dataloader(self: Any, dataloader: Any) -> Any:
        if self.dealing is not None:
            self.dealing.deal(dataloader)
        elif not self.lightning_module.trainer.training:
            self.evaluates_shares = self.evaluates_shares or has_share(dataloader)
            if has_indices(dataloader) and not has_share(dataloader):
                return Evaluated(dataloader)
        return super().process_dataloader(dataloader)  # type: ignore[misc]  # the next class is Lightning's

    # -- an evaluation, of which every rank has all: to add up over the ranks would count each sample several times --

    def on_validation_start(self) -> None:
        self._begin_evaluation()

    def on_test_start(self) -> None:
        self._begin_evaluation()

    def on_validation_end(self) -> None:
        self._end_evaluation()

    def on_test_end(self) -> None:
        self._end_evaluation()

    def _begin_evaluation(self: Any) -> None:
        self.has_all = not self.evaluates_shares
        self.alone = MetricsAlone(self.lightning_module.modules() if self.has_all else ())

    def _end_evaluation(self) -> None:
        self.has_all = False
        if self.alone is not None:
            self.alone.end()
            self.alone = None

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # the next class is Lightning's
        return tensor if self.has_all else super().reduce(tensor, *args, **kwargs)  # type: ignore[misc]

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # the next class is Lightning's
        return tensor if self.has_all else super().all_gather(tensor, *args, **kwargs)  # type: ignore[misc]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        before, self.has_all = self.has_all, False  # what all ranks decide together stays so
        try:
            # the next class is Lightning's
            return bool(super().reduce_boolean_decision(decision, all))  # type: ignore[misc]
        finally:
            self.has_all = before

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """All ranks come here, and rank 0 writes: what is in pieces has to be put together first."""
        # the next class is Lightning's
        super().save_checkpoint(whole(checkpoint), filepath, storage_options)  # type: ignore[misc]


def whole(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with whole weights, on rank 0. Collective."""
    from nbtrain.strategies.kit.row_shards import gathered, holds_shards

    found: dict[str, Any] = gathered(checkpoint, 0) if on_a_rank() and holds_shards(checkpoint) else checkpoint
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
