"""What nbtrain/compat relies on in torch's wrap policies."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, always_wrap_policy

from nbtrain.compat import wrap_policies


def test_policies_that_are_objects() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.LayerNorm(2))
    classes = ModuleWrapPolicy({nn.Linear})
    custom = CustomPolicy(lambda module: {"sharding": 1} if module is model[2] else module is model[1])
    assert wrap_policies.is_policy_object(classes)
    assert wrap_policies.is_policy_object(custom)
    assert not wrap_policies.is_policy_object(always_wrap_policy)
    assert wrap_policies.classes_of(classes) == (nn.Linear,)
    assert wrap_policies.classes_of(custom) is None
    assert wrap_policies.chosen(classes, model) == {model[0]: {}}
    assert wrap_policies.chosen(custom, model) == {model[1]: {}, model[2]: {"sharding": 1}}
