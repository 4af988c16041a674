"""What hooks of torch's set in a layer: the weight of `torch.nn.utils.prune`, or of the older `weight_norm` and
`spectral_norm`.

Such a hook runs where its layer computes, on the rank of the stage. The loop may read what it has set, and what prunes
or normalises once more does, so this rank tells it to the others after every call of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.kit.stage_spot import Spot, send_to_all
from nbtrain.strategies.kit.stage_tensor import is_stage_tensor
from nbtrain.strategies.pipeline.cut_stages import StagedModel
from nbtrain.strategies.pipeline.stage import StagePlace

IN_LOSS = (
    "a loss is computed of a weight that a hook of torch's has set in a layer (prune, weight_norm, spectral_norm), and "
    "under pipeline that is done in its stage: compute it in the loop of what the layer keeps, as "
    "`layer.weight_orig * layer.weight_mask` of a pruned one; or use --strategy fsdp"
)


def tell(layers: Iterable[nn.Module], staged: StagedModel, place: StagePlace) -> None:
    """`layers`: those of the model that have such hooks. Collective."""
    stages = {id(module): stage for part, stage in staged.owners() for module in part.modules()}
    graph = torch.is_grad_enabled()
    with tensors.as_plain_tensors(), torch.no_grad():
        for layer in layers:
            found = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
            for name in sorted(found) if id(layer) in stages else ():
                if not is_stage_tensor(found[name]):
                    full = send_to_all(found[name], Spot(place.stage_tensors, stages[id(layer)])).detach()
                    trains = graph and any(p.requires_grad for p in layer.parameters(recurse=False))
                    vars(layer)[name] = _in_loop(full, trains)


def _in_loop(full: torch.Tensor, trains: bool) -> torch.Tensor:
    """It is no part of a graph there: each micro-batch has one of its own."""
    if trains and full.is_floating_point():
        full.requires_grad_().register_hook(_refuse)
    return full


def _refuse(gradient: Any) -> None:
    raise NotSupported(IN_LOSS)
