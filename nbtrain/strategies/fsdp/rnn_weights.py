"""RNN, LSTM and GRU keep lists of their weights besides: these hold what the module holds, as its attributes do.

The list of weights is made anew by torch whenever they are other tensors than those that it refers to: within a
cell, the gathered ones. Between cells the lists are to be the notebook's own, with the parameters in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

from nbtrain.compat.modules import FLAT_WEIGHT_REFERENCES, FLAT_WEIGHTS, flat_weight_names


class FlatWeights:
    """The lists of weights that RNNs keep beside their attributes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """As they are in the notebook."""
        self.lists: list[tuple[nn.Module, dict[str, list[Any]]]] = []
        for module in modules:
            if isinstance(module, nn.RNNBase):
                lists = FLAT_WEIGHTS, FLAT_WEIGHT_REFERENCES
                held = {name: vars(module)[name] for name in lists if name in vars(module)}
                self.lists.append((module, held))

    def flatten_never(self) -> None:
        """While a cell runs: on a GPU it would put the weights where nobody gathers them to."""
        for module, _ in self.lists:
            vars(module)["flatten_parameters"] = _nothing

    def put_back(self) -> None:
        for module, held in self.lists:
            weights = [getattr(module, name, None) for name in flat_weight_names(module)]
            for name, kept in held.items():
                kept[:] = weights if name == FLAT_WEIGHTS else [None if w is None else ref(w) for w in weights]
                vars(module)[name] = kept


def _nothing() -> None:
    pass
