"""Which optimizers do to a parameter what depends on no other one, so that ranks may step some of the parameters each.

Torch's own do, but for LBFGS. Of anybody else's nobody knows: there may be a norm over all parameters, buffers in a
list beside them, a closure that is called on weights that have been moved, noise that is drawn for one after the other,
an optimizer inside of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import torch
from torch.optim import LBFGS, Optimizer

BESIDES = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}
"""methods that no step calls, so that a class may have its own"""


def steps_each_alone(optimizer: Optimizer) -> bool:
    """Whether it is known that its step treats every parameter by itself: it is of a class of torch's, or of one that
    takes over all that a step of torch's runs."""
    kind = type(optimizer)
    own = list(takewhile(lambda cls: not _of_torch(cls), kind.__mro__))
    base = kind.__mro__[len(own)]
    if base is Optimizer or issubclass(base, LBFGS):
        return False
    return not any(
        hasattr(base, name) and name not in BESIDES and not name.startswith("__") and not _of_torch(value)
        for cls in own
        for name, value in vars(cls).items()
    )


def known_by_name(name: str) -> bool:
    """The same of the name of its class, where that is all there is. Only an estimate may go by it."""
    kind = getattr(torch.optim, name, None)
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (LBFGS, Optimizer)


def why_whole(optimizers: Iterable[Optimizer]) -> list[str]:
    """A sentence for each class of optimizers that are stepped whole."""
    names = {
        type(optimizer).__name__: isinstance(optimizer, LBFGS)
        for optimizer in optimizers
        if not steps_each_alone(optimizer)
    }
    return [
        f"{name} works on all parameters as one vector: its state is whole on every rank"
        if vector
        else f"{name} is not torch's own, and its step may look at all parameters at once: every rank steps it whole, "
        "as under ddp, and has all of its state"
        for name, vector in names.items()
    ]


def _of_torch(thing: object) -> bool:
    """Of a class, or of what is in one. Torch's wrappers around a step have the name of what they wrap."""
    module = str(getattr(thing, "__module__", ""))
    return module == "torch.optim" or module.startswith("torch.optim.")
