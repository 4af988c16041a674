"""Explains torch's error where a part of a unit is called and nobody has gathered its weights.

The children of a unit gather its weights when they are called by themselves; what is further inside does not.
"""

from __future__ import annotations

from types import TracebackType

from torch import nn

from nbtrain.compat.dtensor import met_undivided
from nbtrain.strategies.fsdp import read_numbers

REPLACED = (
    "Under fsdp a model keeps the parameters that it has when the cell begins: what puts tensors in their places "
    "(torch.nn.utils.prune) belongs in a cell before, which is not distributed; or use --strategy ddp"
)


def explain(error: BaseException) -> None:
    """Put the message of an error that a cell has raised in other words, if it is this one."""
    if not read_numbers.active():
        return
    if isinstance(error, TypeError) and "as parameter" in str(error) and _in_torch_utils(error.__traceback__):
        error.args = (f"{error}. {REPLACED}",)
    if met_undivided(error):
        error.args = (f"{_reason(_called(error.__traceback__))} (torch says: {str(error).splitlines()[0]})",)


def _in_torch_utils(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith("torch.nn.utils."):
            return True
        traceback = traceback.tb_next
    return False


def _called(traceback: TracebackType | None) -> nn.Module | None:
    """The outermost module that ran below the last unit; None where no module did."""
    found = None
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, nn.Module):
            if "_nbtrain_tree" in vars(owner):
                found = None
            elif found is None:
                found = owner
    return found


def _reason(module: nn.Module | None) -> str:
    if module is None:
        return (
            "a parameter or gradient of a model that fsdp divides met an ordinary tensor: every rank has some rows of "
            "it only. Weights are whole in the model's own forward and methods: compute it there, or use "
            "--strategy ddp"
        )
    name = type(module).__name__
    return (
        f"{name} was called from outside of the part of the model that fsdp gathers as one and that it is inside of, "
        f"so that its weights are in pieces. Write --wrap {name}, or nbtrain.wrap({name}(...)) where the model is "
        "made: then it is gathered by itself. Or use --strategy ddp, where nothing is in pieces"
    )
