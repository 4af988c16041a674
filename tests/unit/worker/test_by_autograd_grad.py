"""Which gradients of `torch.autograd.grad` are told as each rank's own, and how often they are looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbtrain.base.events import Finished
from nbtrain.notebook.report.cell_report import work_advice
from nbtrain.worker.gradients import by_autograd_grad
from nbtrain.worker.gradients.by_autograd_grad import LOOKS, AutogradGradients


def looking() -> AutogradGradients:
    own = AutogradGradients()
    own.begin(True)
    return own


@pytest.mark.parametrize("kind", ["meta", "of a class of its own", "in a CUDA graph"])
def test_what_cannot_be_looked_at_is_given_all_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(tensor: torch.Tensor) -> str:
        raise RuntimeError("no numbers")

    own, weight, ones = looking(), torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    if kind == "in a CUDA graph":
        own.asked([weight], [ones], False)  # what warms it up
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
    elif kind == "of a class of its own":
        monkeypatch.setattr(by_autograd_grad, "_size", blind)
    own.asked([weight], [ones.to("meta") if kind == "meta" else ones], False)
    assert own.looks == (LOOKS if kind == "meta" else 0)
    own.end()
    assert own.numbers() == {}


def test_no_gradient_is_held_after_a_cell() -> None:
    own = looking()
    own.asked([torch.ones(8, 8, requires_grad=True)], [torch.ones(8, 8)], False)
    held = [one.gradient for one in own.open]
    own.end()
    assert len(held) == 1
    assert own.numbers()
    assert not own.open


def told(*pairs: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """What is said where each rank has been given such a gradient of such a tensor."""
    ended = []
    for rank, (tensor, gradient) in enumerate(pairs):
        own = looking()
        own.asked([tensor], [gradient], False)
        own.end()
        ended.append(Finished(rank=rank, time=0.0, steps=1, compared=own.numbers()))
    return "own gradients" in work_advice(ended)


def test_only_of_what_all_ranks_have_the_same() -> None:
    one, other = torch.ones(3, 2), torch.full((3, 2), 2.0)
    assert told((one, one), (one, other))
    assert not told((one, one), (one, one)), "the same batch"
    assert not told((one, one), (other, other)), "of each rank's input"
    assert not told((one * 0, one), (one * 0, other)), "zeros, as what is added to each rank's input begins with"


def test_what_a_loop_has_put_into_grad_is_known_by_who_wrote_it() -> None:
    def number(size: float, write: Any, in_backward: bool = False) -> dict[str, int]:
        own = looking()
        own.asked([weight], [found * size], False)
        write()
        if in_backward:
            own.backward_ended()
        own.settle()
        weight.grad = None
        own.end()
        return own.numbers()

    def put(factor: float = 1) -> None:
        weight.grad = found * factor + 0.1 * weight.detach()

    weight, found = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    assert number(1, put) == number(2, lambda: put(2)), "the same multiple of the rank's own"
    assert number(1, put) != number(2, put), "scaled to a norm"
    assert number(1, put).keys() == number(2, put).keys()
    assert number(1, lambda: None)
    assert number(1, put, in_backward=True) == number(1, lambda: None)
    assert number(1, put, in_backward=True) != number(2, put, in_backward=True)
