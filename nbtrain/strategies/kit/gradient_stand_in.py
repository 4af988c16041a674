"""Stands where a tensor was whose numbers are elsewhere: it has the tensor's shape, and no content.

What asks for its form is answered, by whatever function of torch; what reads its numbers or writes to them is for each
class: a gradient's refuses, and can be zeroed; an optimizer's state is brought (owned_reads.py).
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.owned_tensors import ANSWERED, name_of

G = TypeVar("G", bound="GradientStandIn")


class StandIn(torch.Tensor):
    """Asked for its form it answers; everything else is for `asked` to say."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = name_of(func), kwargs or {}
        if name in ANSWERED:
            with tensors.as_plain_tensors():
                return func(*args, **kwargs)
        return cls.asked(func, name, args, kwargs)

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class GradientStandIn(StandIn):
    """In the place of `p.grad`."""

    text: ClassVar[str]
    """how it is printed: "a gradient that another rank has" """
    refusal: ClassVar[str]

    @classmethod
    def of(cls: type[G], p: torch.Tensor, dtype: torch.dtype | None = None) -> G:
        """In the parameter's shape, one number in memory."""
        return torch.zeros((), dtype=dtype or p.dtype, device=p.device).expand(p.shape).as_subclass(cls)

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__repr__", "__format__"):
            return f"<{cls.text}, {tuple(args[0].shape)}>"
        if name in ("zero_", "detach_", "requires_grad_"):  # the last two on the way to being zeroed
            return args[0]
        raise NotSupported(cls.refusal)
