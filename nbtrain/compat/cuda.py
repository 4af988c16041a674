"""How torch initialises CUDA. Nothing here imports torch. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

from nbtrain.compat.internals import Internals

its = Internals("torch")

its.members("torch.cuda", "_lazy_init")


def asked_for_a_card(error: BaseException) -> bool:
    """Whether torch raised this because something needs a card, and there is none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    return code is not None and code.co_name == "_lazy_init" and "cuda" in code.co_filename
