"""Metrics of torchmetrics where several ranks have the same samples: to add up over all ranks would count each sample
several times."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import nn

ARE_THERE, GATHERS = "distributed_available_fn", "dist_sync_fn"
"""torchmetrics' names for functions of a metric: whether there are other ranks to compute it with, and what gathers"""


class MetricsAlone:
    """Those among these modules, until `end`."""

    def __init__(self, modules: Iterable[nn.Module], seen_by: int | None = None) -> None:
        """`seen_by`: how many ranks, one after another, have the same samples; None: all, so each computes alone."""
        self._name = ARE_THERE if seen_by is None else GATHERS
        self._before = [(module, getattr(module, self._name)) for module in modules if hasattr(module, ARE_THERE)]
        for metric, _ in self._before:
            setattr(metric, self._name, _no_others if seen_by is None else partial(_one_of_each, seen_by))

    def end(self) -> None:
        for metric, before in self._before:
            setattr(metric, self._name, before)
        self._before = []


def _no_others() -> bool:
    return False


def _one_of_each(seen_by: int, tensor: Any, group: Any = None) -> list[Any]:
    gather = resolve_name("torchmetrics.utilities.distributed:gather_all_tensors")  # there is a metric, and so is this
    return list(gather(tensor, group)[::seen_by])
