"""What strategies have in common that keep the whole model on every rank and average its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nbtrain.compat.layers import NormLayer
from nbtrain.strategies.base import Component, is_lazy


def norms_of(modules: Iterable[nn.Module]) -> list[NormLayer]:
    """Layers whose running statistics are to be averaged, too: SyncBatchNorm does so itself."""
    parts = {id(part): part for module in modules for part in module.modules()}
    return [part for part in parts.values() if isinstance(part, NormLayer) and not isinstance(part, nn.SyncBatchNorm)]


def replicas_of(component: Component) -> Iterator[tuple[str, torch.Tensor]]:
    """What should be equal on every rank when a cell has ended, by name."""
    for where, module in component.modules.items():
        for path, part in module.named_modules():
            at = f"{where}.{path}" if path else where
            for name, parameter in part.named_parameters(recurse=False):
                if not is_lazy(parameter):
                    yield f"{at}.{name}", parameter
            for name, buffer in part.named_buffers(recurse=False):
                if not is_lazy(buffer) and not (isinstance(part, NormLayer) and name.startswith("running_")):
                    yield f"{at}.{name}", buffer
    yield from component.loose.items()
