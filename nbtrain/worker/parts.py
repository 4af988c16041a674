"""What a rank's runtime is made of: parts, each of which is told when a cell begins and when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.base.specs import RankInfo, RunSpec
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.base import Strategy, share_of

if TYPE_CHECKING:
    from nbtrain.worker.loop.shared_board import Board


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """This rank's share of the batches: batch `index` of every `count`, or its part of every batch (`split`)."""

    index: int
    count: int
    split: bool = False
    whole: bool = False
    """one process stands for all ranks, and gets the whole round"""
    each: int = 0
    """batches of a round, which is cut evenly over the ranks; 0: as many as there are ranks"""

    @property
    def at_a_time(self) -> int:
        """Batches of one process that all ranks take together."""
        return 1 if self.split else self.each or self.count


class Cell:
    """A cell on this rank, as all parts are told of it."""

    def __init__(
        self,
        run: RunSpec,
        objects: Mapping[str, object],
        info: RankInfo,
        strategy: Strategy,
        board: Board | None = None,
        number: int = 0,
        trial: Any = None,
    ) -> None:
        """`objects`: what the strategy has set up. `number`: the run's, the same on all ranks. `trial`: its
        `TrialSteps`, where the cell is tried."""
        self.run, self.objects, self.board, self.number, self.trial = run, objects, board, number, trial
        self.record = None if trial is None else trial.record
        self.models: list[Module] = []
        self.optimizers: list[Optimizer] = []
        self.scheduled = False
        """there are learning rate schedules among the objects"""
        for item in objects.values():
            if isinstance(item, Module):
                self.models.append(item)
            elif isinstance(item, Optimizer):
                self.optimizers.append(item)
            elif isinstance(item, LRScheduler):
                self.scheduled = True
        self.hands_off = strategy.facts.hands_off
        self.managed = not self.hands_off and run.ranks is None
        """all ranks run it, and the strategy sets up its models"""
        self.several = info.world_size > 1
        self.world_size = info.world_size
        self.elastic = run.elastic or run.notes_place
        """machines may come and go meanwhile, or another run is to go on where this one is stopped"""
        index, self.count = share_of(strategy, info.rank, info.world_size) if run.sampler else (0, 1)
        self.sharing = self.count if self.managed else 1
        """ranks, or groups of ranks, that train on batches of their own"""
        deal = Deal(index=index, count=self.count, split=run.split_batches)
        if run.batches not in (0, self.count) and run.sampler and not run.split_batches:  # as the ranks that began
            alone = self.count == 1
            deal = replace(deal, count=run.batches, whole=True) if alone else replace(deal, each=run.batches)
        if run.trial is not None and run.trial.record is not None and (ranks := run.trial.record.stands_for):
            deal = replace(deal, count=ranks if run.sampler else 1, whole=True)
        self.deal = deal
        self.batches = run.accumulate * deal.at_a_time
        """of one process, that make one step"""


class Part:
    """One part of a runtime. None of these has to be there: what a part leaves out costs nothing."""

    def listen(self, listeners: Listeners) -> None:
        """The runtime is put in place: listen to functions of torch (`replaced_functions.TABLE` says why)."""

    def begin(self, cell: Cell) -> Iterable[str] | None:
        """A cell is about to run. Returns sentences for the user."""

    def end(self, ok: bool) -> Iterable[str] | None:
        """It has run, has failed, or was refused by a part that begins later. Returns sentences for the user."""

    def advice(self, names: Mapping[str, object], stepped: bool) -> Mapping[str, str]:
        """On the cell that has just ended, by name; the notebook shows each once. `names`: of the cell's namespace;
        `stepped`: an optimizer has taken a step."""
        return {}

    def compared(self) -> Mapping[str, int]:
        """Numbers by name, which the notebook compares between ranks (notebook/report/cell_report.py)."""
        return {}
