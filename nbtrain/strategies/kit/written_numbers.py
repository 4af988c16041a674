"""What a cell writes to what ranks keep in pieces: each notes it, and they compare whether it was the same.

With a number of a rank's own (`p.grad.mul_(c)`, the limit of a clipping, a state dict) each rank would keep its part of
another tensor, and train on. Ranks compare what they have noted in a reduction that there is anyway, at the end of a
backward (fsdp, pipeline), or before some steps (divided_steps.py); the notebook does when the cell ends. Numbers are
compared exactly, tensors by their norms, apart from what machines of several kinds round differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat.autograd_engine import is_plain
from nbtrain.strategies.kit.collective_calls import OWN_NUMBERS

numbers: list[int] = []
"""A number of all that was written since ranks compared it; empty: nothing was."""
norms: list[torch.Tensor] = []
"""of the tensors that were written since"""
WORDS = 2**24
"""whole numbers that float32 has"""
NOTHING = [0.0] * 4
"""`told()` where nothing was written"""
NAN = 0x7FC0
"""what stands for it: no two NaNs have one hash"""
ROUNDING = 5e-3
"""in logarithms of norms that were added up, as float32 has it"""
FIRST = 4
"""the steps of a cell before which ranks compare what they step; and then the 8th, 16th, 32nd …"""
MADE_BY = "_nbtrain_numbers"
"""the attribute of a tensor in pieces that was computed with numbers, or with weights: theirs is of their names"""


def begin() -> None:
    """A cell begins, or ranks have compared."""
    numbers.clear()
    norms.clear()


def wrote(*values: Any) -> None:
    """Note that something made of these numbers was written to a piece."""
    told = numbers_in(values)
    if told:
        numbers[:] = [hash((*numbers, told))]


def found_gradients(there: Sequence[bool], usual: bool) -> None:
    """Note which parameters have a gradient, unless it is as usual: none before a backward, all before a step. Where
    one rank alone sets some to None, others add to theirs, or step by them."""
    if (not usual) in there:
        wrote(hash((usual, *there)))


def wrote_whole(values: Iterable[Any]) -> None:
    """The same of numbers and of tensors that this rank has whole."""
    values = [*values]
    wrote(*values)
    for value in values:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and (value.ndim or not _on_cpu(value)):
            plain = value.detach()
            floats = plain.is_floating_point() or plain.is_complex()
            norms.append((plain if floats else plain.float()).norm())


def numbers_in(values: Iterable[Any]) -> int:
    """A number of the numbers in these, and of those that pieces among them were computed with; 0: there are none."""
    digest = 0
    for value in values:
        kind = type(value)
        if isinstance(value, float | int):
            digest = hash((digest, value if value == value else NAN))
        elif isinstance(value, torch.Tensor):
            if made := vars(value).get(MADE_BY):
                digest = hash((digest, made))
            elif kind is torch.Tensor and not value.ndim and _on_cpu(value):
                digest = hash((digest, numbers_in((value.item(),))))
        elif kind is list or kind is tuple:
            if inner := numbers_in(value):
                digest = hash((digest, inner))
        elif isinstance(value, np.number):
            digest = hash((digest, numbers_in((value.item(),))))
    return digest


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_plain(tensor)


# --- compared ---------------------------------------------------------------------------------------


def size() -> float:
    """The logarithms of the norms, added up."""
    return math.fsum(math.log2(min(max(1e-30, float(norm)), 1e30)) for norm in norms)  # NaN is small, too


def told() -> list[float]:
    """What a rank adds to a reduction by the largest."""
    number, logarithms = (numbers[0] if numbers else 0) % WORDS, size()
    return [float(number), logarithms, -float(number), -logarithms]


def check(most: Sequence[float]) -> None:
    """`most`: the largest of what the ranks have told. All raise where they wrote different numbers, or none does."""
    number, logarithms, least, least_logarithms = most
    if number != -least or logarithms + least_logarithms > ROUNDING:
        raise NotSupported(OWN_NUMBERS)


def compare(device: torch.device | str) -> None:
    """Collective: one small reduction on this device."""
    most = torch.tensor(told(), dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    check(most.tolist())
    begin()
