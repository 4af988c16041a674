"""Tensors that the notebook or an earlier cell has made of a weight, and that share its memory: `state =
model.state_dict()`, `w = model[0].weight.detach()`.

Where ranks keep the weight in pieces, what shows the weight takes their places while a cell runs, wherever the rank
holds them; what nothing can take the place of refuses to be used. Afterwards they are as before: in the notebook they
are the weight's own memory, so they bring no content home.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nbtrain.base.errors import NotSupported
from nbtrain.compat.modules import tensors_of
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import Node
from nbtrain.exchange.kinds.split_tensors import SplitTensor, form_in, no_alias
from nbtrain.strategies.base import Prepared
from nbtrain.worker.home.weight_views import WeightViews
from nbtrain.worker.setup.components import Components, Replaced
from nbtrain.worker.setup.shown_tensors import names_of
from nbtrain.worker.setup.taken_tensors import give_up, showing, take_back

BEFORE = (
    "a tensor of {name} that was made in the notebook or in an earlier cell, and that shares its memory there; in this "
    "cell the ranks keep the weight in pieces, or elsewhere, and it cannot show it: make it in the cell that uses it "
    "(`w = model.weight.detach()`, `state = model.state_dict()`), or as a copy (`w.clone()`, `copy.deepcopy(state)`)"
)
MOVED = (
    "a tensor of a weight that was made in the notebook or in an earlier cell was given other memory in the cell "
    "(`w.data = …`), and ranks keep the weight in pieces: write to it (`w.copy_(…)`), or bind the name anew (`w = …`)"
)
Found = Sequence[tuple[Node, Sequence[tuple[Node, SplitTensor]]]]


class Aliases:
    """Those of one rank."""

    def __init__(self) -> None:
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []
        """what the notebook has, and what stands for it"""
        self._of: list[torch.Tensor] = []
        """the weights that these show"""
        self._refused: list[torch.Tensor] = []

    @torch.no_grad()
    def begin(self, found: Found, table: ObjectTable, prepared: Iterable[Prepared], replaced: Replaced) -> None:
        """A cell is about to run, and components are as it sees them. Collective. `found`: by `note_aliases`."""
        components = [one.component for one in prepared]
        names = {number: name for one in components for number, name in names_of(one).items()}
        modules = [module for one in components for module in one.modules.values()]
        owned = {id(tensor) for module in modules for kind in tensors_of(module) for tensor in kind}
        for node, held in found:
            tensor = node.obj
            if type(tensor) is torch.nn.Parameter and owned.isdisjoint(id(of.obj) for of, _ in held):
                no_alias(table, node)  # `weight_norm(layer)`: nobody has the weight any more but an optimizer
                continue
            shows = None
            if len(held) == 1 and type(tensor) is torch.Tensor and not tensor.requires_grad:
                ((of, apart),) = held
                form = form_in(table.apart[id(tensor)], apart)
                if form is not False and of.obj.dtype == tensor.dtype:
                    shows = showing(of.obj, form)
            if shows is not None:
                self._shown.append((tensor, shows))
                self._of.append(held[0][0].obj)
            else:
                self._refused.append(tensor)
                give_up(tensor, names.get(id(held[0][0].obj), "a weight") if held else "a weight", BEFORE)
        if self._shown:
            replaced(self._shown[:])

    def check(self, components: Components) -> None:
        """The cell has come to its end: raise where one of them no longer shows its weight."""
        weights = WeightViews([*components.pieces()] if self._shown else ())
        for (_, shows), of in zip(self._shown, self._of, strict=True):
            if weights.holds(of) and ((place := weights.by(shows)) is None or place[0] is not of):
                raise NotSupported(MOVED)

    def end(self, replaced: Replaced) -> None:
        """The cell is over, however it ended."""
        shown, self._shown, self._of = self._shown, [], []
        if shown:
            replaced([(shows, tensor) for tensor, shows in shown])
        while self._refused:
            take_back(self._refused.pop())
