"""What stands where a gradient was that only its owner has."""

from __future__ import annotations

from typing import Any

from nbtrain.compat import tensors
from nbtrain.strategies.kit.gradient_stand_in import GradientStandIn

READ = (
    "a gradient was looked at or edited (p.grad, or by a GradScaler of one's own), and under sharded one rank has it "
    "and the others have not: clip_grad_norm_ returns their norm, and --precision 16-mixed scales losses; for loops "
    "that read or edit gradients take --strategy zero1, or --strategy ddp"
)


class Elsewhere(GradientStandIn):
    text = "a gradient that another rank has"
    refusal = READ

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == tensors.ZERO_MANY:
            with tensors.as_plain_tensors():
                return func([one for one in args[0] if not isinstance(one, cls)])
        return super().asked(func, name, args, kwargs)
