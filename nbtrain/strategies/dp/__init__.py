"""`dp`: one process has all the devices; each computes a part of every batch, in a thread of its own.

The outputs are put together on the first device, so that what the loop makes of them (a softmax over the whole batch,
a contrastive loss) is what one device would. On CPU the devices are threads that share the weights; on GPUs each gets
a copy of them for a call, and gradients are summed on the first one as autograd passes through that copy.

A model that cannot be called in parts is called with whole batches (`CutPlan` in kit/split_batch.py). Where it draws
random numbers on a device that several parts share (dropout on CPU), the parts are computed in turn: a seed says then
what they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nbtrain.compat import layers
from nbtrain.compat.modules import compiled_parts
from nbtrain.strategies.base import ALL, Component, Facts, HoldsModules, Prepared, Strategy
from nbtrain.strategies.dp.threads import Threads, carried
from nbtrain.strategies.kit.batch_structure import cut, flatten
from nbtrain.strategies.kit.module_replicas import replica
from nbtrain.strategies.kit.profile_arithmetic import divided, estimate
from nbtrain.strategies.kit.split_batch import CutCall, CutCalls, alike
from nbtrain.strategies.kit.units_to_wrap import called_by_loops
from nbtrain.strategies.memory_estimate import Estimate, Profile, World


class _Sent(torch.autograd.Function):
    """Copies tensors to another device, and gradients back. A tensor that is not used gets no gradient."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = [t.device for t in tensors]
        return tuple(t.to(device, non_blocking=True) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        home = zip(grads, ctx.home, strict=True)
        return None, *(None if g is None else g.to(device, non_blocking=True) for g, device in home)


class PreparedDP(HoldsModules):
    """A component whose models are called in parts."""

    promises = ALL

    def __init__(self, component: Component, devices: Sequence[torch.device]) -> None:
        super().__init__(component)
        self.devices = list(devices)
        self.threads = Threads(self.devices)
        cuda = any(device.type == "cuda" for device in self.devices)
        self.calls = CutCalls("dp", len(self.devices), self._run, cuda)
        self.shared = len(set(self.devices)) < len(self.devices)
        """whether some parts draw from one generator"""
        self.known: set[int] = set()
        """ids of models that were called in parts"""
        self.draws: set[int] = set()
        """those of them that draw random numbers"""
        self.notes.append(f"each batch is cut over {len(self.devices)} devices")

    def enter(self) -> None:
        models = self.component.modules.values()
        self.calls.on([*models, *called_by_loops(models)])

    def leave(self, pause: bool = False) -> None:
        self.calls.off()
        self.known.clear()
        self.draws.clear()
        self.threads.close()

    def release_modules(self) -> Callable[[], Prepared]:
        self.known.clear()
        self.draws.clear()
        return self.calls.release_modules(self)

    def _run(self, call: CutCall) -> Any:
        if call.plan.reason:
            return call.plain()
        works = self._works(call)
        returned = self._compute(call.module, works)
        flat = [flatten(output) for output in returned]
        parts = [tensors for tensors, _ in flat]
        form = flat[0][1]
        modes = None
        if all(structure.key == form.key and len(tensors) == len(parts[0]) for tensors, structure in flat):
            modes = call.plan.modes_for(form.key, [[t.shape for t in part] for part in parts], call.sizes)
        home = self.devices[0]
        if modes is not None:
            columns = [[t.to(home) for t in column] for column in zip(*parts, strict=True)]
            if all(alike(column) for mode, column in zip(modes, columns, strict=True) if mode == "same"):
                return form.rebuild(
                    [column[0] if m == "same" else torch.cat(column) for m, column in zip(modes, columns, strict=True)]
                )
        self.calls.give_up(call)
        return call.plain()

    def _works(self, call: CutCall) -> list[Callable[[], Any]]:
        works: list[Callable[[], Any]] = []
        for i, tensors in enumerate(cut(call.tensors, call.batch, call.sizes)):
            device = self.devices[i]
            # The first part goes through the model itself: what a forward notes, it notes there.
            go = self._on(call.module, device) if i else partial(layers.call_as_torch_does, call.module)
            args, kwargs = call.form.rebuild([t.to(device, non_blocking=True) for t in tensors])
            works.append(partial(go, *args, **kwargs))
        return works

    def _on(self, module: nn.Module, device: torch.device) -> nn.Module:
        away = [p for p in module.parameters() if p.device != device]
        if not away:
            return replica(module)
        sent = _Sent.apply(device, *away)
        return replica(
            module,
            {id(p): copied for p, copied in zip(away, sent, strict=True)},
            lambda b: b.to(device, non_blocking=True, copy=True),
        )

    def _compute(self, module: nn.Module, works: Sequence[Callable[[], Any]]) -> list[Any]:
        key = id(module)
        in_turn = (
            key in self.draws or (self.shared and key not in self.known) or not carried() or compiled_parts(module)
        )
        before = _random_states()
        returned = [work() for work in works] if in_turn else self.threads.run(works)
        self.known.add(key)
        after = _random_states()
        if self.shared and not (torch.equal(before[0], after[0]) and before[1] == after[1]):
            self.draws.add(key)
        return returned


def _random_states() -> tuple[torch.Tensor, Any]:
    return torch.get_rng_state(), random.getstate()


class DP(Strategy):
    """Data parallel training in the threads of one process."""

    facts = Facts(threads=True)

    def estimate(self, profile: Profile, world: World) -> Estimate:
        if world.kind == "cpu":  # threads, which share the weights
            return estimate(profile, world, activations=divided(profile, world.devices, here=world.devices))
        if world.devices == 1:
            return estimate(profile, world)
        # The first device has the most: the others send it all their gradients at once, when they are whole.
        gradients = profile.gradients
        return estimate(
            profile,
            world,
            travelling=lambda arrived: gradients if arrived >= gradients else 0,
            activations=divided(profile, world.devices),
            sent=(world.devices - 1) * (profile.parameters + profile.buffers) * world.accumulate,
        )

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        devices = [torch.device(name) for name in self.place.devices]
        return PreparedDP(component, devices) if len(devices) > 1 else Prepared(component)
