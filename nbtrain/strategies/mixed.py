"""A part of a unit that is called where nobody has gathered its weights: torch's error, in words that help.

The children of a unit gather its weights when they are called by themselves; what is further inside does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from nbtrain.errors import NotSupported

SIGN = "got mixed torch.Tensor and DTensor"


def explained(old: Callable[..., Any]) -> Callable[..., Any]:
    """`old`: the function of torch's that fails where an ordinary tensor meets one in pieces."""

    @functools.wraps(old)
    def explaining(*args: Any, **kwargs: Any) -> Any:
        try:
            return old(*args, **kwargs)
        except RuntimeError as error:
            if SIGN not in str(error):
                raise
            raise NotSupported(_reason(_called(sys._getframe(1)))) from error

    return explaining


def _called(frame: FrameType | None) -> nn.Module | None:
    """The outermost module that is running, up to the first unit; None where a unit itself or no module does."""
    found = None
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, nn.Module):
            if "_nbtrain_tree" in vars(owner):
                break
            found = owner
        frame = frame.f_back
    return found


def _reason(module: nn.Module | None) -> str:
    if module is None:
        return (
            "an ordinary tensor and a parameter or gradient of a model that fsdp divides cannot be in one operation: "
            "every rank has some rows of it only. Weights are whole in the model's own forward and methods: compute "
            "it there; or use --strategy ddp"
        )
    name = type(module).__name__
    return (
        f"{name} was called by itself, from outside of the part of the model that fsdp gathers as one and that it is "
        f"inside of, so that its weights are in pieces. Say --wrap {name}, or nbtrain.wrap({name}(...)) where the "
        "model is made: then it is gathered by itself"
    )
