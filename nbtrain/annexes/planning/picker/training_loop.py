"""A training loop for a model whose notebook has run none yet: forward, backward and step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from nbtrain.annexes.planning.profile.model_and_batch import ModelAndBatch

LOOP = """from nbtrain.annexes.planning.profile.model_call import find_call, find_loss
{optimizer}for batch in (batch for _ in range(10**6) for batch in {batches}):
    call = find_call({model}, batch)
    loss, _ = find_loss({model}(*call.given, **call.named), call.targets)
    loss.backward()
    {stepped}.step()
    {stepped}.zero_grad()
"""
"""It goes on until it is stopped, which a trial does."""
OWN = "import torch\noptimizer = torch.optim.SGD({model}.parameters(), lr=0.0)\n"


def loop(found: ModelAndBatch, notebook: dict[str, Any]) -> str:
    """The body of a cell. The loss is the one that the plan uses."""
    is_loader = isinstance(notebook.get(found.batch_name), DataLoader)
    return LOOP.format(
        model=found.name,
        optimizer="" if found.optimizer_name else OWN.format(model=found.name),
        stepped=found.optimizer_name or "optimizer",
        batches=found.batch_name if is_loader else f"[({found.batch_name})]",
    )


def resized(batch: Any, samples: int) -> Any:
    """The batch, cut or extended to this number of samples. Added ones are uninitialised: only shapes are read."""
    if isinstance(batch, torch.Tensor):
        if not batch.dim():
            return batch
        made = torch.empty((samples, *batch.shape[1:]), dtype=batch.dtype, device=batch.device)
        made[: len(batch)] = batch[:samples]
        return made
    if isinstance(batch, dict):
        return {name: resized(part, samples) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [resized(part, samples) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
