"""Says in other words what torch says of weights in pieces."""

from __future__ import annotations

from types import TracebackType

import torch
from torch.distributed.tensor import DTensor

from nbtrain.compat.dtensor import met_undivided
from nbtrain.strategies.fsdp import piece_functions

REPLACED = (
    "Under fsdp a model keeps its parameters while a cell runs: write `with whole(model, optimizer): …` around what "
    "puts tensors in their places (torch.nn.utils.prune)"
)

UNDIVIDED = (
    "an operator of torch.ops was given a parameter or gradient in pieces, and an ordinary tensor: call torch's own "
    "function (torch.add, not torch.ops.aten.add), or write `with whole(model): …` around the line"
)
ORDINARY = (
    "Under fsdp only weights, gradients, states and what is computed of them number by number are DTensors; what else "
    "is computed of them is an ordinary, complete tensor. Leave the line out, or write `with whole(model): …` around it"
)


def explain(error: BaseException) -> None:
    """Put the message of an error that a cell has raised in other words, if it is this one."""
    if not piece_functions.listening.owners:
        return
    if isinstance(error, TypeError) and "as parameter" in str(error) and _in_torch_utils(error.__traceback__):
        error.args = (f"{error}. {REPLACED}",)
    if isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor) and hasattr(DTensor, str(error.name)):
        error.args = (f"{error}. {ORDINARY}",)
    if met_undivided(error):
        error.args = (f"{UNDIVIDED} (torch says: {str(error).splitlines()[0]})",)


def _in_torch_utils(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith("torch.nn.utils."):
            return True
        traceback = traceback.tb_next
    return False
