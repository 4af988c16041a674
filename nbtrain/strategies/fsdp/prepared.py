"""A component under `fsdp`: every rank holds a part of its parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbtrain.base.errors import NotSupported
from nbtrain.compat import fsdp2
from nbtrain.compat import modules as torch_modules
from nbtrain.compat.dtensor import local as local_part
from nbtrain.strategies.base import Component, Piece, Prepared, Promises, Shards
from nbtrain.strategies.fsdp import autograd_calls, given_memory, piece_functions, piece_memory
from nbtrain.strategies.fsdp.fully_shard import ShardedTree, prefetch_further
from nbtrain.strategies.fsdp.fully_shard_options import check, kept_whole, policies
from nbtrain.strategies.fsdp.model_copies import COPY, add_copy, average_whole, let_copies_go, make_copy
from nbtrain.strategies.kit.clipping import clip_to, norm_over_ranks
from nbtrain.strategies.kit.component_tensors import added, optimized, parameters_of
from nbtrain.strategies.kit.dtensor_operations import copies_made, counts, forget_name, full_tensor, is_copy, thawed
from nbtrain.strategies.kit.gradient_average import GradientAverage
from nbtrain.strategies.kit.named_tensors import owners
from nbtrain.strategies.kit.replicated import replicas_of
from nbtrain.strategies.kit.row_shards import (
    RowShards,
    as_parameter,
    cut,
    cut_state,
    cut_what_is_loaded,
    fresh_storage,
    held_tensors,
    places,
    rebind,
    whole,
)
from nbtrain.strategies.kit.running_statistics import launch_statistics, norms_of
from nbtrain.strategies.kit.same_on_ranks import differing
from nbtrain.strategies.kit.units_to_wrap import find_roots, find_units
from nbtrain.strategies.kit.written_numbers import found_gradients

FROZEN = (
    "the ranks train different weights (`p.requires_grad_(rank == 0)`), and under fsdp each keeps its part of every "
    "one: freeze and thaw the same on every rank"
)
MIDST = (
    "save(), load(), setup() or whole() in the middle of a model's forward or backward: under fsdp its weights are "
    "gathered for just then. Write it between loss.backward() and the next forward, or take --strategy ddp"
)
HELD = (
    "setup() or load() in the middle of --accumulate: the model would be set up anew, and the gradients gathered so "
    "far would be lost. Write it above the loop, or where a step has just been taken"
)


class PreparedFSDP(Shards):
    """A component of which every rank holds a part."""

    promises = Promises(hooks_see_means=True, any_optimizer=True)

    def __init__(self, component: Component, options: Any, mesh: DeviceMesh) -> None:
        super().__init__(component)
        self.options = options
        self.mesh = mesh
        roots = find_roots(component.modules.values())
        kept = kept_whole(component, roots)
        check(component, kept)
        self.trees: list[ShardedTree] = []
        self.thawed = thawed[0]
        """what that was when the ranks compared it last"""
        self.copied = sum(COPY in name for name in component.modules)
        """how many copies were made"""
        self.ids: set[int] = set()
        """of the sharded parameters"""
        new: dict[int, torch.Tensor] = {}
        for root in roots:
            new |= self._shard(root, kept)
        for optimizer in component.optimizers.values():
            self.replaced += rebind(optimizer, new, cut_state)
        self.sync = GradientAverage(kept, norms=norms_of(roots))
        self.whole = kept
        self.handles: list[Any] = []
        for tree in self.trees:
            tree.take_off()

    # --- setting up ------------------------------------------------------------------------------

    def _shard(
        self, root: nn.Module, kept: list[torch.Tensor], cut_already: dict[int, Any] | None = None
    ) -> dict[int, torch.Tensor]:
        """Set up one tree; returns id of an old parameter → new one. What torch puts on modules is on them afterwards.
        `cut_already`: the new ones, by the ids of the old ones, where they exist."""
        known = set(map(id, kept))
        before = [place for place in places([root]) if id(place[2]) not in known]
        for _, _, p in before:
            if not p.is_contiguous():
                p.data = p.data.contiguous()
        units = find_units(root, self.options.wrap)
        named = (name for name, module in self.component.modules.items() if module is root)
        name = next(named, f"{type(root).__name__}{COPY}{self.copied + 1})")
        tree = ShardedTree(name, root, units, lambda is_root: policies(self.options, self.mesh, is_root, kept))
        new: dict[int, torch.Tensor] = {}
        for part, name, old in before:
            if id(old) not in new:
                fsdp2.take_number(old)
                sharded = torch_modules.parameters(part)[name]
                assert isinstance(sharded, DTensor)
                if cut_already:
                    sharded = cut_already[id(old)]
                elif sharded.is_meta:
                    device = "cpu" if self.options.cpu_offload else self.mesh.device_type
                    sharded = nn.Parameter(fresh_storage(sharded, torch.device(device)), old.requires_grad)
                vars(sharded).update(vars(old))
                if old.grad is not None and not old.grad.is_sparse:
                    sharded.grad = cut(sharded, old.grad)
                new[id(old)] = sharded
                self.replaced.append((old, sharded))
            torch_modules.parameters(part)[name] = new[id(old)]
        tree.finish()
        tree.copy = self.copy
        if not self.options.limit_all_gathers:
            prefetch_further(part for part in root.modules() if any(part is unit for unit in units))
        self.trees.append(tree)
        tree.ids = {id(p) for p in new.values()}
        self.ids |= tree.ids
        return new

    def copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """`copy.deepcopy(model)` in a cell."""
        self._let_copies_go()
        told, self.replaced = self.replaced, []  # nobody has held the copy's parameters yet
        try:
            twin = make_copy(module, memo, self.trees, self._shard)
        finally:
            self.replaced = told
        self.copied = add_copy(self.component.modules, twin, self.copied + 1)
        self.handles += average_whole(twin)
        return twin

    def _let_copies_go(self) -> None:
        self.trees = let_copies_go(self.component.modules, self.trees)
        self.ids = {number for tree in self.trees for number in tree.ids}

    def release_modules(self) -> Callable[[], Prepared]:
        # A unit with its attachments on holds its tree.
        trees = [(ref(tree), None if tree.attachments.attached else tree) for tree in self.trees]
        norms = [ref(norm) for norm in self.sync.norms]
        self.trees, self.sync.norms = [], []

        def hold_again() -> Prepared:
            self.trees = [tree for alive, _ in trees if (tree := alive()) is not None]
            self.ids = {number for tree in self.trees for number in tree.ids}
            self.sync.norms = [norm for alive in norms if (norm := alive()) is not None]
            return self

        return hold_again

    # --- while a cell runs -----------------------------------------------------------------------

    def enter(self) -> None:
        if self.handles:
            return
        for tree in self.trees:
            tree.put_on()
        autograd_calls.listening.on(self)
        piece_functions.listening.on(self)
        owners.append(self)
        for tree in self.trees:
            tree.name_pieces()
        self.handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for name, module in self.component.modules.items():
            self.handles += average_whole(module) if COPY in name else ()
        for optimizer in self.component.optimizers.values():
            self.handles += cut_what_is_loaded(optimizer)

    def leave(self, pause: bool = False) -> None:
        if pause and any(tree.busy for tree in self.trees):
            raise NotSupported(MIDST)
        self._stop()
        for tree in self.trees:
            (tree.reshard if pause else tree.reset)()
            tree.take_off()
        if not pause:
            self.sync.reset()

    def _stop(self) -> None:
        if self.handles:
            piece_functions.listening.off(self)
            owners.remove(self)
            if not piece_functions.listening.owners:
                piece_memory.forget()
            self._forget_names()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        autograd_calls.listening.off(self)
        self._let_copies_go()

    def _forget_names(self) -> None:  # by itself: a copy that is let go of next is held by no variable
        for weight in self._weights():
            forget_name(fsdp2.sharded(weight))

    def _mine(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self.ids for group in optimizer.param_groups for p in group["params"])

    def holds(self, tensor: torch.Tensor) -> bool:
        """One of the parameters in pieces, or what is gathered of it, which a model shows from forward to backward."""
        return id(tensor) in self.ids or any(fsdp2.unsharded(weight) is tensor for weight in self._weights())

    def in_graphs(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What autograd knows in the place of a parameter in pieces: what is gathered of it."""
        gathered = (fsdp2.unsharded(weight) for weight in self._weights() if fsdp2.sharded(weight) is tensor)
        return next(gathered, None)

    def _weights(self) -> Iterator[Any]:
        for tree in self.trees:
            yield from tree.weights()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        given_memory.check("data")
        if not self._mine(optimizer):
            return
        found_gradients([p.grad is not None for p in parameters_of(optimizer)], usual=True)
        if self.sync.norms:
            with torch.no_grad():
                launch_statistics(self.sync.norms)()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._mine(optimizer):
            for tree in self.trees:  # what is still gathered is not what the optimizer has made of the shards
                tree.reshard()
                tree.usage.stepped()
            for holder, key, value in held_tensors(list(optimizer.state.values())) if copies_made else ():
                if isinstance(value, DTensor) and is_copy(value):
                    holder[key] = full_tensor(value).clone()

    @contextmanager
    def backward(self, sync: bool = True) -> Iterator[float]:
        """Without `sync` gradients are added up whole, on every rank, until the next that has it."""
        roots: list[Any] = [] if sync else [tree.root for tree in self.trees]
        try:
            for weight in self._weights():
                autograd_calls.refuse_hooks(fsdp2.sharded(weight), fsdp2.unsharded(weight))
            given_memory.check("grad")
            if self.thawed != thawed[0]:
                self._compare_frozen()
            with self.sync.backward(sync) as factor:
                for root in roots:
                    root.set_requires_gradient_sync(False)
                yield factor
        except BaseException:
            for tree in self.trees:
                if tree.attachments.attached:
                    tree.reset()
            raise
        finally:
            for root in roots:
                root.set_requires_gradient_sync(True)

    def _compare_frozen(self) -> None:
        """Collective: where a weight was frozen or thawed, that is written for all ranks."""
        self.thawed = thawed[0]
        trains = torch.tensor([p.requires_grad for p in self._parameters()])
        if any(differing([trains], self.mesh.device_type)):
            raise NotSupported(FROZEN)

    def rescale(self, parameters: Iterable[torch.Tensor], factor: float) -> None:
        """Multiply what is held back, too."""
        super().rescale(parameters, factor)
        for gradient in self._held_back():
            gradient.mul_(factor)

    def _held_back(self) -> Iterator[torch.Tensor]:
        """Whole gradients that wait for the next backward that is communicated."""
        for weight in self._weights():
            yield from fsdp2.held_back(weight)

    def complete_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self.sync.catch_up(parameters)

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float | None) -> torch.Tensor | None:
        """torch's own would return a DTensor, and knows nothing of parameters that are whole."""
        chosen = list(parameters)
        self.sync.catch_up(chosen)
        if norm_type is None or not any(id(p) in self.ids for p in chosen):
            return None
        parts = [local_part(p.grad) for p in chosen if isinstance(p.grad, DTensor)]
        rest = [p.grad for p in chosen if p.grad is not None and not isinstance(p.grad, DTensor)]
        mesh = self.mesh
        dtype = torch.float32 if all(g.dtype != torch.float64 for g in (*parts, *rest)) else torch.float64
        group = mesh.get_group(mesh.ndim - 1)
        total = norm_over_ranks(parts, norm_type, mesh.device_type, rest, dtype, group, parts=True)
        clip_to((*parts, *rest), total, max_norm)
        counts[1] += 1
        return total.to(parts[0].device) if parts else total

    def gradient_pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        yield from ((p, RowShards(p.grad)) for p in self._parameters() if isinstance(p.grad, DTensor))

    # --- between cells ---------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        yield from ((p, RowShards(p)) for p in self._parameters())
        for optimizer in self.component.optimizers.values():
            for _, _, value in (
                entry for p in parameters_of(optimizer) for entry in held_tensors(optimizer.state.get(p))
            ):
                if isinstance(value, DTensor):
                    yield value, RowShards(value)

    def _parameters(self) -> list[DTensor]:
        by_id = {id(p): p for tree in self.trees for p in tree.root.parameters() if isinstance(p, DTensor)}
        return list(by_id.values())

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        return replicas_of(self.component, lambda tensor: id(tensor) not in self.ids)

    def grow(self, component: Component) -> bool:
        if {id(m) for m in component.modules.values()} != {id(m) for m in self.component.modules.values()}:
            return False
        if any(tree.parts != set(map(id, tree.root.modules())) for tree in self.trees):
            return False  # a layer stands in another's place, with its parameters perhaps
        known = self.ids | {id(p) for p in self.whole}
        if any(id(p) not in known for p in (*optimized(component), *component.loose.values())):
            return False
        self.replaced = []
        same: dict[int, torch.Tensor] = {id(p): p for p in self._parameters()}
        for optimizer in added(self.component, component):
            self.replaced += rebind(optimizer, same, cut_state)
        self.component = component
        return True

    def close(self, whole: bool = True) -> None:
        if whole:
            self._make_whole()
        if self.handles:
            self.leave()
        self.sync.close()
        for tree in self.trees:
            tree.forget()
        self.trees = []
        self.ids = set()

    def _make_whole(self) -> None:
        if next(self._held_back(), None) is not None:
            raise NotSupported(HELD)
        new: dict[int, torch.Tensor] = {}
        self.replaced = []
        stepped = (p for optimizer in self.component.optimizers.values() for p in parameters_of(optimizer))
        gone = {id(p): p for p in stepped if isinstance(p, DTensor)}  # also of layers that are in no model any more
        for p in (gone | {id(p): p for p in self._parameters()}).values():
            full = new[id(p)] = as_parameter(whole(p), p)
            if isinstance(p.grad, DTensor):
                full.grad = whole(p.grad)
            self.replaced.append((p, full))
        for part, name, piece in places(tree.root for tree in self.trees):
            torch_modules.parameters(part)[name] = new.get(id(piece), piece)
        for optimizer in self.component.optimizers.values():
            self.replaced += rebind(
                optimizer, new, lambda p, value: whole(value) if isinstance(value, DTensor) else value
            )
