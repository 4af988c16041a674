"""Two numbers by which a script tells whether it has trained the weights that the notebook had."""

from __future__ import annotations

import torch


def fingerprint(weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """The size of the weights, and a sum in which each has a factor of its own."""
    size = total = 0.0
    for name, value in weights.items():
        if value.is_floating_point() and "running_" not in name:
            numbers = value.detach().cpu().double().reshape(-1)
            size += numbers.square().sum().item()
            total += numbers.dot(torch.arange(1.0, len(numbers) + 1, dtype=torch.float64).cos()).item()
    return size**0.5, total
