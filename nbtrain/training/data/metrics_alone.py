"""Metrics of torchmetrics in an evaluation of which every rank has all samples: each computes its own, alone. To add up
over the ranks would count each sample several times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

ARE_THERE = "distributed_available_fn"
"""torchmetrics' name for the function of a metric that tells whether there are other ranks to compute it with"""


class MetricsAlone:
    """Those among these modules, until `end`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before: list[tuple[Any, Any]] = [
            (one, getattr(one, ARE_THERE)) for one in modules if hasattr(one, ARE_THERE)
        ]
        for metric, _ in self._before:
            setattr(metric, ARE_THERE, _no_others)

    def end(self) -> None:
        for metric, before in self._before:
            setattr(metric, ARE_THERE, before)
        self._before = []


def _no_others() -> bool:
    return False
