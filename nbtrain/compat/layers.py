"""torch's own layers, and how a module is called. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from nbtrain.compat.internals import Internals
from nbtrain.compat.modules import NORM_LAYER

its = Internals("torch")

NormLayer: Any = its.name(NORM_LAYER)
its.members("torch.nn.SyncBatchNorm", "_check_input_dim")
_SpectralNorm: Any = its.name("torch.nn.utils.parametrizations._SpectralNorm")


def call_as_torch_does(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module's hooks and forward, whatever has replaced `__call__` of its class or of the module itself."""
    return nn.Module._call_impl(module, *args, **kwargs)


def power_iterations(module: nn.Module) -> list[Any]:
    """Its spectral norms, or itself if it is one: each call goes on by their `n_power_iterations` while it trains."""
    hooks = module._forward_pre_hooks.values()
    return [part for part in (module, *hooks) if isinstance(part, (SpectralNorm, _SpectralNorm))]


def check_input(norm: nn.SyncBatchNorm, x: Any) -> None:
    """Raise what the layer raises for an input of other dimensions."""
    norm._check_input_dim(x)
