"""The lists of weights that recurrent layers keep beside their attributes: between cells as the notebook knows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

from nbtrain.compat.modules import FLAT_WEIGHT_REFERENCES, FLAT_WEIGHTS, flat_weight_names


def _nothing() -> None:
    """No lambda: a part of a model may be pickled."""


class FlatWeights:
    """The lists of weights that RNN, LSTM and GRU keep beside their attributes.

    torch makes a list anew whenever the weights are other tensors than those that it refers to: within a cell, the
    gathered ones. Between cells the lists are the notebook's own, with the parameters in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.lists: list[tuple[nn.Module, dict[str, list[Any]]]] = []
        for module in modules:
            if isinstance(module, nn.RNNBase):
                lists = FLAT_WEIGHTS, FLAT_WEIGHT_REFERENCES
                of_module = {name: vars(module)[name] for name in lists if name in vars(module)}
                self.lists.append((module, of_module))

    def flatten_never(self) -> None:
        """While a cell runs: on a GPU flattening moves the weights away from where they are gathered."""
        for module, _ in self.lists:
            vars(module)["flatten_parameters"] = _nothing

    def let_go(self) -> None:
        """While a cell runs: `model.to(dtype)` cannot exchange a parameter in pieces that somebody refers to weakly."""
        for _, of_module in self.lists:
            references = of_module.get(FLAT_WEIGHT_REFERENCES, [])
            references[:] = [_nothing] * len(references)  # another weight than before: torch makes the lists anew

    def put_back(self) -> None:
        for module, of_module in self.lists:
            weights = [getattr(module, name, None) for name in flat_weight_names(module)]
            for name, kept in of_module.items():
                kept[:] = weights if name == FLAT_WEIGHTS else [None if w is None else ref(w) for w in weights]
                vars(module)[name] = kept
