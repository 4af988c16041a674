"""Random numbers that a cell draws for a weight: the same on every rank, and those of one process.

Ranks have random states of their own once they are apart, so that dropout differs. A weight that is drawn anew then
(`nn.init.normal_(p)`, `layer.reset_parameters()`, `p.add_(torch.randn_like(p))`, noise on `p.grad`) would be another
one on each rank. Such a draw is made from where one process would stand. It needs every rank.

What is drawn for anything else is not touched. Weights in pieces have draws of their own
(`strategies/kit/dtensor_operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from nbtrain.compat import autograd_engine
from nbtrain.compat.intercept import Listeners
from nbtrain.strategies.kit.gradient_graphs import MeanOverRanks
from nbtrain.strategies.kit.random_draws import AS_A_WEIGHT
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.random_states.rank_random_states import Randomness
from nbtrain.worker.setup import whole
from nbtrain.worker.setup.components import Components
from nbtrain.worker.setup.in_cell_models import InCellModels

IN_PLACE = tuple(
    f"torch.Tensor.{name}_"
    for name in ("normal", "uniform", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric")
)
BY_A_COPY = ("torch.nn.init.orthogonal_", "torch.nn.init.sparse_")
"""They draw for a tensor of their own, and write that into the weight."""
LIKE = tuple(f"torch.{name}_like" for name in ("rand", "randn", "randint"))
DEVICES = ("cpu", "cuda")


class WeightDraws(Part):
    """Has a rank draw for weights what one process would."""

    def __init__(self, randomness: Randomness, components: Components, in_cell_models: InCellModels) -> None:
        self.randomness, self.components, self.in_cell_models = randomness, components, in_cell_models
        self.drawing = False
        self.begin()

    def begin(self, cell: Cell | None = None) -> None:
        self.looked_at: list[Any] = []
        self.own: dict[int, ref[torch.Tensor]] = {}
        """id of a parameter or of its gradient → the tensor, as ids are used again"""
        self.memory: dict[int, ref[torch.Tensor]] = {}
        self.shapes: set[torch.Size] = set()

    def listen(self, listeners: Listeners) -> None:
        for path in (*IN_PLACE, *BY_A_COPY, *LIKE) if self.components.world_size > 1 else ():
            listeners.listen(path, "weight_draws", self._listener)

    def _listener(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def draw(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self.drawing or kwargs.get("generator") is not None or not self._of_a_weight(tensor):
                return old(tensor, *args, **kwargs)
            self.drawing = True
            try:
                with self.randomness.one_process(tensor.device):
                    return old(tensor, *args, **kwargs)
            finally:
                self.drawing = False

        return draw

    def _of_a_weight(self, tensor: Any) -> bool:
        """Whether this is a parameter that is whole here, a part of one, or its gradient."""
        if getattr(type(tensor), AS_A_WEIGHT, False):
            return not self.randomness.is_together
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not self.in_cell_models.active:
            return False
        if whole.open_blocks:  # all that is drawn there is
            return False
        if self.randomness.is_together or tensor.device.type not in DEVICES:
            return False
        if tensor.grad_fn is not None:
            return autograd_engine.is_of(MeanOverRanks, tensor.grad_fn)
        if self.looked_at != self.components.prepared:
            self._look()
        if self._known(tensor):
            return True
        if tensor.requires_grad or tensor.shape not in self.shapes:
            return False
        self._look()  # gradients come and go, and a weight may have been given other memory
        return self._known(tensor)

    def _known(self, tensor: torch.Tensor) -> bool:
        if (one := self.own.get(id(tensor))) is not None and one() is tensor:
            return True
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        key = _memory(tensor)
        weight = one() if (one := self.memory.get(key)) is not None else None
        return weight is not None and _memory(weight) == key

    def _look(self) -> None:
        self.begin()
        self.looked_at = self.components.prepared
        for prepared in self.looked_at:
            for p in prepared.component.parameters():
                if type(p) in (torch.Tensor, torch.nn.Parameter):
                    self.own[id(p)] = ref(p)
                    self.shapes.add(p.shape)
                    if p.grad is not None:
                        self.own[id(p.grad)] = ref(p.grad)
                    for tensor in (p, p.grad):
                        if tensor is not None and tensor.layout is torch.strided and tensor.numel():
                            self.memory[_memory(tensor)] = ref(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
