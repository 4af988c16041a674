"""How torch initialises CUDA. Nothing here imports torch. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch")

its.members("torch.cuda", "_lazy_init", "_lazy_call", "_queued_calls")


def call_when_initialised(cuda: Any, function: Callable[[], None]) -> bool:
    """Have torch call the function as soon as CUDA is initialised; False where this torch has no queue for it. `cuda`:
    the module."""
    if not hasattr(cuda, "_lazy_call"):
        return False
    cuda._lazy_call(function)
    return True


def call_no_more(cuda: Any, function: Callable[[], None]) -> None:
    """Undo `call_when_initialised`."""
    queue = getattr(cuda, "_queued_calls", [])
    queue[:] = [call for call in queue if call[0] != function]


def asked_for_a_card(error: BaseException) -> bool:
    """Whether torch raised this because something needs a card, and there is none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    return code is not None and code.co_name == "_lazy_init" and "cuda" in code.co_filename
