"""What each micro-batch counts in a criterion's mean over the batch.

Most of torch's criteria count samples. Those of classes leave out what `ignore_index` names, and weigh by class, so
that micro-batches of one size count differently. Of a user's own nobody knows: it is compared with the whole batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nbtrain.strategies.pipeline.micro_batches import Cut, shares

NOT_A_MEAN = (
    "--loss: the criterion gives {whole:.6g} for the batch, and for its micro-batches {parts:.6g} on average, so that "
    "under pipeline it is no mean over samples (does it leave some out?). Leave --loss out, or use --strategy ddp"
)
BY_CLASS = nn.CrossEntropyLoss, nn.NLLLoss
BY_CLASS_TOO = F.cross_entropy, F.nll_loss


def counts_alike(criterion: Any) -> bool:
    """It is torch's own, whose means are known."""
    kind = criterion if not isinstance(criterion, nn.Module) else type(criterion)
    return str(getattr(kind, "__module__", "")).startswith("torch.")


def weights(criterion: Callable[..., Any], targets: Sequence[Any], kwargs: dict[str, Any], cut: Cut) -> list[float]:
    """For each micro-batch, one in all."""
    y = targets[0] if targets else kwargs.get("target", kwargs.get("input"))
    by_class = isinstance(criterion, BY_CLASS) or criterion in BY_CLASS_TOO
    if not by_class or not isinstance(y, torch.Tensor) or y.is_floating_point() or y.shape[:1] != (cut.batch,):
        return shares(cut)
    weight = kwargs.get("weight", targets[1] if len(targets) > 1 else getattr(criterion, "weight", None))
    counts = y != kwargs.get("ignore_index", getattr(criterion, "ignore_index", -100))
    each = counts.double()
    if isinstance(weight, torch.Tensor):
        each = each * weight.double()[y.clamp(min=0) * counts]
    sums = torch.stack([part.sum() for part in each.split(cut.sizes)])
    return (sums / sums.sum()).tolist() if sums.sum() else shares(cut)
