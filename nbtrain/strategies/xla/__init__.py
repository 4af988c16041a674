"""`xla`: every rank holds the model on an XLA device (a TPU's core) and sees a share of the batches.

A tensor of XLA cannot take a CPU tensor's place (`p.data = …` is refused by torch), so parameters, buffers and the
optimizer's state become others on the ranks; to the notebook they are kept elsewhere, and come home by way of the CPU.
Written against torch_xla's documented calls; see library.py. It was run on XLA's CPU device, and on no TPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbtrain.base.errors import NotSupported
from nbtrain.compat.layers import NormLayer
from nbtrain.compat.modules import buffers, parameters
from nbtrain.strategies.base import Component, Facts, Piece, Prepared, Promises, Shards, Strategy, is_lazy
from nbtrain.strategies.kit.component_tensors import buffers_of, named_parameters
from nbtrain.strategies.kit.owned_tensors import OwnedTensor
from nbtrain.strategies.kit.profile_arithmetic import estimate, ring
from nbtrain.strategies.kit.row_shards import rebind
from nbtrain.strategies.memory_estimate import Estimate, Profile, World
from nbtrain.strategies.xla import library

SPARSE = (
    "sparse gradients are not averaged under xla: make the embedding with sparse=False, or use --strategy ddp, under "
    "which they are"
)
LAZY = (
    "a layer that gets its shape from its first batch cannot be moved under xla before that: call the model once in "
    "the notebook, or use --strategy ddp"
)


class DeviceTensor(OwnedTensor):
    """A tensor that is whole on the device of every rank, and comes home by way of the CPU."""

    def read(self) -> Sequence[torch.Tensor]:
        # To the CPU first: a reshape on the device would be compiled for each shape.
        return [self.tensor.detach().cpu().reshape(-1)] if self._speaks else []


class PreparedXLA(Shards):
    """A component that exists once on every rank's device."""

    promises = Promises(any_optimizer=True, steps_alone=True)

    def __init__(self, component: Component, rank: int, ranks: int) -> None:
        super().__init__(component)
        self.rank, self.ranks = rank, ranks
        self.averaged: dict[int, torch.Tensor] = {}
        """parameter → the gradient that all ranks have, until the step"""
        self.handles: list[Any] = []
        self._move(library.device())

    def _move(self, device: torch.device) -> None:
        """Move everything to the device. Old and new tensors are noted in `replaced`."""
        new: dict[int, torch.Tensor] = {}
        for module in self.component.modules.values():
            for part in module.modules():
                for table in (parameters(part), buffers(part)):
                    for name, old in table.items():
                        if old is not None:
                            table[name] = self._moved(old, device, new)
        for loose in self.component.loose.values():
            self._moved(loose, device, new)
        self.component.loose = {name: new[id(p)] for name, p in self.component.loose.items()}
        for optimizer in self.component.optimizers.values():
            self.replaced += rebind(optimizer, new, lambda _, value: value.to(device))

    def _moved(self, old: torch.Tensor, device: torch.device, new: dict[int, torch.Tensor]) -> torch.Tensor:
        if is_lazy(old):
            raise NotSupported(LAZY)
        if id(old) not in new:
            there = old.detach().to(device)
            if isinstance(old, nn.Parameter):
                there = nn.Parameter(there, old.requires_grad)
            else:
                there.requires_grad_(old.requires_grad)
            vars(there).update(vars(old))
            if old.grad is not None:
                there.grad = old.grad.to(device)
            new[id(old)] = there
            self.replaced.append((old, there))
        return new[id(old)]

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def backward(self, sync: bool = True) -> Iterator[float]:
        try:
            yield 1.0
        except BaseException:
            self.averaged.clear()
            raise
        if sync:
            self._average(True)

    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self._average(False)

    @torch.no_grad()
    def _average(self, again: bool) -> None:
        """Averaging is idempotent, so a gradient to which something was added may be averaged once more."""
        if self.ranks == 1:
            return
        trained = [p for p in self.component.parameters() if p.requires_grad]
        wanted = [p.grad is not None and (again or self.averaged.get(id(p)) is not p.grad) for p in trained]
        marks = torch.tensor(wanted, dtype=torch.uint8)
        dist.all_reduce(marks, dist.ReduceOp.MAX)  # another rank may have used what this one has not
        trained = [p for p, some in zip(trained, marks.tolist(), strict=True) if some]
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.is_sparse:
                raise NotSupported(SPARSE)
        gradients = [p.grad for p in trained if p.grad is not None]
        self._average_all([*gradients, *(self._statistics() if again else ())])
        self.averaged |= {id(p): p.grad for p in trained if p.grad is not None}

    def _statistics(self) -> list[torch.Tensor]:
        """Running statistics, which are averaged so that all ranks evaluate one model."""
        norms = {
            id(part): part
            for module in self.component.modules.values()
            for part in module.modules()
            if isinstance(part, NormLayer) and part.training
        }
        return [b for norm in norms.values() for b in (norm.running_mean, norm.running_var) if b is not None]

    def _average_all(self, tensors: list[torch.Tensor]) -> None:
        if tensors and library.together() == self.ranks:
            library.average(tensors, self.ranks)
        elif tensors:  # XLA's CPU device reaches nobody; the ranks' process group does
            flat = torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors])
            dist.all_reduce(flat.div_(self.ranks))
            for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(mean.to(tensor.dtype).view(tensor.shape))

    # --- cells -----------------------------------------------------------------------------------

    def enter(self) -> None:
        if not self.handles:
            before = register_optimizer_step_pre_hook(self._before_step)
            after = register_optimizer_step_post_hook(self._after_step)
            self.handles = [before, after]

    def leave(self, pause: bool = False) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []  # no sync: what is written down of a step that was cut short may wait for the others

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._mine(optimizer):
            self._average(False)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._mine(optimizer):
            self.averaged.clear()
            library.sync()

    def _mine(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(optimizer is other for other in self.component.optimizers.values())

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        tensors = [*self.component.parameters(), *buffers_of(self.component)]
        for optimizer in self.component.optimizers.values():
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if library.on_device(value)]
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            yield tensor, DeviceTensor(tensor, True, self.rank == 0, self)

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter.detach().cpu()) for name, parameter in named_parameters(self.component))

    def close(self, whole: bool = True) -> None:
        self.leave()
        if whole:
            self._move(torch.device("cpu"))


class XLA(Strategy):
    """Data parallel training of whole models on XLA devices."""

    facts = Facts(moves=True)

    def estimate(self, profile: Profile, world: World) -> Estimate:
        return estimate(
            profile,
            world,
            step=profile.step,
            sent=2 * ring(profile.gradients, world.ranks),
            notes=("XLA's compiler decides what is computed together: activations are those of torch without it",),
        )

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if precision.startswith("16"):
            raise NotSupported(
                f"--precision {precision}: under xla losses are not scaled, and TPUs compute in bfloat16; take "
                "--precision bf16-mixed, or --strategy ddp on GPUs"
            )
        library.seed(torch.initial_seed() % 2**31 + self.place.rank)
        return PreparedXLA(component, self.place.rank, self.place.world_size)
