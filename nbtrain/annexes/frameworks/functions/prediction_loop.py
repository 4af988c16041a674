"""What `predict` runs on each rank; from how many bytes on what it gives goes to files, and to which folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nbtrain.annexes.frameworks.functions.prediction_step import PredictionStep
from nbtrain.annexes.frameworks.functions.predictions import RankPredictions
from nbtrain.worker.data.whole_batches import WholeBatches
from nbtrain.worker.loop.steps import Stage

IN_MEMORY = 2 * 10**9
"""bytes of predictions that all ranks together hold in memory; what is beyond them is written to files"""
ALL = 1 << 62
"""batches"""


class PredictionLoop:
    """Called with a model and a loader, on every rank."""

    def __init__(self, step: PredictionStep) -> None:
        self.step = step
        self.folder = _free_folder()
        self.items: list[Any] = []
        """on rank 0 the predictions of all batches, in order"""
        self.samples: torch.Tensor | None = None
        """the index of each sample; None: they have none"""

    def __call__(self, model: Any, loader: Any) -> None:
        from nbtrain.worker.runtime import installed  # on a rank

        runtime: Any = installed()
        deal, most = runtime.loaders.deal, IN_MEMORY // runtime.info.world_size
        kept = RankPredictions(Path(self.folder), most if runtime.info.nodes == 1 else ALL)  # one machine has the files
        modes = [(part, part.training) for part in model.modules()]
        runtime.steps.stage_of = lambda loader: Stage(0, None, "predict")
        model.eval()
        try:
            with runtime.loaders.evaluations.seen_whole():
                dealt = WholeBatches(loader, ALL, (deal.index, deal.count), runtime.randomness.shared())
                batches = iter(dealt)
            with torch.no_grad():
                for number, batch in batches:
                    kept.add(number, self.step(model, batch, number))
        finally:
            runtime.steps.stage_of = None
            for part, mode in modes:
                part.training = mode
        orders = runtime.loaders.evaluations.orders
        self.items = dealt.whole(kept.items)
        if self.step.as_rows:
            self.samples = dealt.samples(orders.indices(loader) if orders is not None else None)


def _free_folder() -> str:
    """`predictions_0`, or the first number after all that are there."""
    taken = [number for old in Path.cwd().glob("predictions_*") if (number := old.name[12:]).isdecimal()]
    return str(Path.cwd() / f"predictions_{max(map(int, taken), default=-1) + 1}")
