"""What is known of a function of torch: which of its arguments it writes to, as torch itself hands them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nbtrain.strategies.kit.known_functions import known, written

W, V = torch.zeros(3, 3), torch.zeros(3, 3)
ROW, STATE = torch.zeros(3), torch.zeros(3, 3)
GRAD, COUNT = torch.zeros(3, 3), torch.zeros(())
NAMES = {id(W): "w", id(V): "v", id(ROW): "row", id(STATE): "state", id(GRAD): "grad", id(COUNT): "count"}
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 0.1, "amsgrad": False, "maximize": False}
INDEX = torch.tensor([0])


class Written(TorchFunctionMode):
    """What the outermost functions write to, without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        targets = written(known(func), args, kwargs or {}, torch.Tensor)
        self.names += [NAMES[id(target)] for target in targets]
        asks = getattr(func, "__name__", "") in ("dim", "size", "numel", "__get__", "detach")
        return func(*args, **(kwargs or {})) if asks else W


def in_place() -> None:
    w = W
    w += 1


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: W.add_(V), "w"),
        (lambda: torch.Tensor.add_(W, other=V), "w"),
        (lambda: W.copy_(V), "w"),
        (lambda: W.lerp_(V, 0.5), "w"),
        (lambda: W.addcmul_(V, V), "w"),
        (lambda: W.index_put_((INDEX,), ROW), "w"),
        (lambda: W.masked_fill_(V > 0, 1.0), "w"),
        (lambda: W.uniform_(), "w"),
        (lambda: W.__setitem__(0, ROW), "w"),
        (lambda: W.__ilshift__(1), "w"),
        (in_place, "w"),
        (lambda: torch.relu_(W), "w"),
        (lambda: torch.clamp_(input=W, max=1.0), "w"),
        (lambda: W.resize_(9), "w"),
        (lambda: W.squeeze_(), "w"),
        (lambda: W.t_(), "w"),
        # out=
        (lambda: torch.add(W, V, out=V), "v"),
        (lambda: torch.frexp(W, out=(V, STATE)), "v state"),
        (lambda: torch.sort(W, out=[V, STATE]), "v state"),
        (lambda: torch.add(W, V, out=None), ""),
        # of lists
        (lambda: torch._foreach_mul_([W, V], 2.0), "w v"),
        (lambda: torch._foreach_copy_([W, V], (GRAD, STATE)), "w v"),
        (lambda: torch._foreach_mul([W, V], 2.0), ""),
        (lambda: torch._foreach_norm([W, V]), ""),
        (lambda: torch._fused_adam_([W], [GRAD], [STATE], [V], [], [COUNT], **ADAM), "w grad state v"),
        (lambda: torch._amp_foreach_non_finite_check_and_unscale_([GRAD], COUNT, ROW), "grad count"),
        # torch.nn
        (lambda: nn.init.normal_(W), "w"),
        (lambda: nn.init.xavier_uniform_(tensor=W), "w"),
        (lambda: F.dropout(W, inplace=True), "w"),
        (lambda: F.dropout(W), ""),
        (lambda: F.relu(W, inplace=True), "w"),
        (lambda: F.hardtanh(W, inplace=False), ""),
        (lambda: torch.nn.utils.vector_to_parameters(ROW, []), ""),
        # what shows, asks or makes
        (lambda: W.view(9), ""),
        (lambda: W[0], ""),
        (lambda: W.t(), ""),
        (lambda: W.sort(), ""),
        (lambda: W.requires_grad_(False), ""),
        (lambda: W.__add__(V), ""),
        (lambda: W.__invert__(), ""),
        (lambda: W.__index__(), ""),
        (lambda: torch.where(W > 0, W, V), ""),
        (lambda: F.linear(W, V), ""),
        # of which there is no schema
        (lambda: W.share_memory_(), "w"),
        (lambda: W.tolist(), ""),
        (lambda: W.share_memory_, ""),
    ],
)
def test_which_arguments_are_written(call: Callable[[], Any], names: str) -> None:
    with Written() as mode:
        call()
    assert mode.names == names.split()


def test_functions_without_a_schema() -> None:
    def scale_(tensor: torch.Tensor) -> None: ...
    def scale(tensor: torch.Tensor) -> None: ...

    assert written(known(scale_), (W,), {}, torch.Tensor) == [W]
    assert written(known(scale), (W,), {}, torch.Tensor) == []
    assert written(known(scale_), ([W],), {}, nn.Parameter) == []
