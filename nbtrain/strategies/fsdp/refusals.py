"""What is refused of functions that are given tensors in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.kit import named_tensors
from nbtrain.strategies.kit.named_tensors import named
from nbtrain.strategies.kit.same_on_ranks import differing

DIFFERS = (
    "`{}` writes to {} with a tensor that differs between ranks, and under fsdp each rank keeps its part of one "
    "tensor. Give all ranks the same: reduce(tensor), and random numbers from torch.randn_like(weight) or in a block "
    "`with {}: …`, where all ranks draw the same"
)
REPLACED = (
    "the parameter {} of a layer {} was replaced or taken away, and fsdp would go on with the one of which each rank "
    "has some rows: write `with whole(model, optimizer): …` around that line, and where the optimizer is to step the "
    "new one, make it in the same block"
)
CAST = (
    "the parameter {} of a layer {} has got another dtype in the cell (model.double(), .half(), .to(…)), and fsdp was "
    "set up for the one before: write `with whole(model, optimizer): …` around that line"
)
DERIVED = (
    "{} was put on a layer in the cell (torch.nn.utils.parametrizations), whose parameters fsdp held: write "
    "`with whole(model, optimizer): …` around that line, and make the new optimizer in the same block"
)
ROWS = "of which under fsdp each rank has some rows"


def tensors_in(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for operand in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(operand, torch.Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from (inner for inner in operand if isinstance(inner, torch.Tensor))


def refuse_differing(name: str, tensor: DTensor, args: Any, kwargs: Any) -> None:
    read = {key: operand for key, operand in kwargs.items() if key != "out"}
    own = [operand for operand in tensors_in(args, read) if not isinstance(operand, DTensor) and operand.ndim]
    if any(differing(own, tensor.device_mesh.device_type)):
        raise NotSupported(DIFFERS.format(name, *named(tensor)))


def unknown(name: str, tensor: DTensor) -> NotSupported:
    return named_tensors.unknown(name, tensor, ROWS)
