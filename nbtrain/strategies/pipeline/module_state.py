"""What there is in modules, attributes and buffers: put back, or compared with what a forward has left.

The forward of a part runs on the rank of its stage, once for each micro-batch. So what it keeps in its module (a count,
an activation, a running mean) is not what one process has, and the other ranks have nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat import layers, modules, tensors

SETS = (
    "the forward of {part} sets self.{name}, and under pipeline it runs on the rank of its stage alone, once for each "
    "micro-batch: return what it keeps, and keep it in the loop, below the call (`model.{name} = …`), or use "
    "--strategy fsdp"
)
WRITES = (
    "the forward of {part} writes to its buffer {name}, which under pipeline it does once for each micro-batch: write "
    "--microbatches 1, or use --strategy fsdp"
)
PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple)
HOLDS = (list, dict, set)


class ModuleState:
    """As the modules are when it is made."""

    def __init__(self, held: Iterable[nn.Module]) -> None:
        self.attributes = [(module, dict(vars(module))) for module in held]
        self.inside = [
            (module, name, value, value.copy())
            for module, attributes in self.attributes
            for name, value in attributes.items()
            if type(value) in HOLDS
        ]
        """also its tables of parameters and buffers"""
        with tensors.as_plain_tensors():
            self.buffers = [
                (module, name, buffer, tensors.version(buffer), buffer.detach().clone())
                for module, _ in self.attributes
                for name, buffer in modules.buffers(module).items()
                if buffer is not None
            ]

    @torch.no_grad()
    def put_back(self) -> None:
        for module, attributes in self.attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for _, _, container, before in self.inside:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
        with tensors.as_plain_tensors():
            for _, _, buffer, version, numbers in self.buffers:
                if tensors.version(buffer) != version:
                    buffer.copy_(numbers)

    def set(self) -> Iterator[tuple[nn.Module, str]]:
        """(module, attribute or buffer) of what is another one now. Torch's hooks set weights (spectral_norm)."""
        for module, before in self.attributes:
            by_hooks = bool(modules.call_hooks(module))
            for name, value in vars(module).items():
                if not _same(value, before.get(name, before)) and not (by_hooks and isinstance(value, torch.Tensor)):
                    yield module, name
        for module, name, container, before in self.inside:
            if name in modules.TABLES:
                yield from (
                    (module, key) for key in {**container, **before} if container.get(key) is not before.get(key)
                )
            elif list(map(id, _values(container))) != list(map(id, _values(before))):
                yield module, name

    def check(self, first: bool) -> None:
        """Raise where a part has kept something. `first`: what has run is the first micro-batch of a call."""
        for module, name in self.set():
            raise NotSupported(SETS.format(part=type(module).__name__, name=name))
        for module, name, buffer, version, _ in () if first else self.buffers:
            if tensors.version(buffer) != version and not isinstance(module, layers.NormLayer):
                raise NotSupported(WRITES.format(part=type(module).__name__, name=name))


def _same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, PLAIN) and type(now) is type(before) and bool(now == before))


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
