"""Tables of cells that are written for CPU ranks, played on a GPU: `ON_CARDS=1`, as `make gpu` has it."""

from __future__ import annotations

import os
from collections.abc import Mapping

ON_CARDS = os.environ.get("ON_CARDS") == "1"
CARDS = "--accelerator cuda --oversubscribe" if ON_CARDS else ""
"""Flags of `%%distributed`: all ranks on the cards that are there, several on one where they are fewer."""

_BESIDE = "its cell gives a model on a GPU what is on the CPU, or adds up there what the GPU has, as torch refuses too"
_WITHOUT = "it is about a machine without a GPU"
NOT_ON_CARDS: Mapping[str, str] = {
    "EMA by deepcopy": _BESIDE,
    "BatchNorm: the ranks agree, also when they evaluate": _BESIDE,
    "averages of models that are made one after another": _BESIDE,
    "outputs of all ranks, and correct / len(dataset)": _BESIDE,
    "an optimizer that is given another model's parameters": _BESIDE,
    "parameters put into an optimizer behind its back": _BESIDE,
    "torch.save on every rank, and back": "its notebook compares what it has on the CPU with a file of the GPU's",
    "cuda said outright, on a machine without": _WITHOUT,
    "x.cuda(), on a machine without": _WITHOUT,
}
"""Lines that a GPU does not play, and why."""
