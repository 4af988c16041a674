"""torch's policies for what FSDP wraps (`torch.distributed.fsdp.wrap`): what they choose, with nothing wrapped."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from nbtrain.compat.internals import Internals

its = Internals("torch")
check = its.check

_WRAP = "torch.distributed.fsdp.wrap"
_Policy = its.name(f"{_WRAP}._Policy")
its.takes(f"{_WRAP}.CustomPolicy._run_policy", "self", "root_module", "ignored_modules", "root_kwargs")
its.fields(f"{_WRAP}.ModuleWrapPolicy", "_module_classes")


def is_policy_object(rule: Any) -> bool:
    """A ModuleWrapPolicy, a CustomPolicy, or another object that torch asks about a whole model at once."""
    return isinstance(rule, _Policy)


def classes_of(rule: Any) -> tuple[type[nn.Module], ...] | None:
    """What a ModuleWrapPolicy was given; None for every other policy."""
    return tuple(rule._module_classes) if isinstance(rule, ModuleWrapPolicy) else None


def chosen(policy: Any, root: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Modules, and the options of its own that the policy has for each: mostly none."""
    found: dict[nn.Module, dict[str, Any]] = policy._run_policy(root, ignored_modules=set(), root_kwargs={})
    return found
