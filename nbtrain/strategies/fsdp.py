"""`fsdp`: parameters, gradients and optimizer state are divided among the ranks, by torch's `fully_shard` (FSDP2).

A unit's weights are gathered for its forward and backward, and let go of in between. What `--sharding` stands for:

    FULL_SHARD     a mesh of one dimension. Weights are let go of after a unit's forward and gathered again in the
                   backward; the root's own, which the backward needs first, are kept. `reshard_after_forward=None`
    SHARD_GRAD_OP  the same mesh, `reshard_after_forward=False`: weights stay whole from forward to backward; between
                   steps they are divided as well, as gradients and optimizer state always are
    HYBRID_SHARD   a mesh of two dimensions, (replicas, ranks / replicas): divided within a replica, gradients
                   averaged between replicas
    NO_SHARD       `fully_shard` has no such thing. It is the same mesh with replicas of one rank each: everything is
                   whole on every rank, and a unit's weights are copied for its forward. ddp does this with less

`--limit-all-gathers`: FSDP2 never gathers more than one unit ahead, and needs no switch for it. Taken back with
`--no-limit-all-gathers`, two units ahead are gathered explicitly, in both directions: more overlap, more memory.

`--comm-dtype` is a MixedPrecisionPolicy. bf16 and fp16: weights are gathered and gradients reduced in it, and units
compute in it, which halves what is sent and rounds otherwise than --precision bf16-mixed. fp32: gradients of a model in
halves are reduced in fp32. Without it, precision is seen to by autocast, and nothing is rounded on its way.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbtrain.errors import NotSupported, UsageError
from nbtrain.strategies.base import Component, Piece, Prepared, Strategy, is_lazy
from nbtrain.strategies.fully_sharded import Tree, prefetch_further
from nbtrain.strategies.gradsync import GradSync
from nbtrain.strategies.refusals import Refusals
from nbtrain.strategies.shards import (
    Rows,
    as_parameter,
    cut,
    fresh_storage,
    places,
    rebind,
    refuse_odd_state,
    sum_of_powers,
    whole,
)
from nbtrain.strategies.units import check_rule, find_roots, find_units

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
Dtype = Literal["none", "bf16", "fp16", "fp32"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


COPY = " (copy "
"""in the names of modules that a cell has copied"""


class Sharded(Prepared):
    """A component of which every rank holds a part."""

    def __init__(self, component: Component, options: FSDP.Options, mesh: DeviceMesh) -> None:
        super().__init__(component)
        self.options = options
        self.mesh = mesh
        for optimizer in component.optimizers.values():
            refuse_odd_state(optimizer, "fsdp", "--strategy ddp")
        roots = find_roots(component.modules.values())
        kept = _kept_whole(component, roots)
        _check(component, kept)
        self.trees: list[Tree] = []
        self.copied = sum(COPY in name for name in component.modules)
        """how many copies were made"""
        self.ids: set[int] = set()
        """of the sharded parameters"""
        new: dict[int, torch.Tensor] = {}
        for root in roots:
            new |= self._shard(root, kept)
        for optimizer in component.optimizers.values():
            self.replaced += rebind(optimizer, new, _cut_state)
        norms = {
            id(part): part
            for root in roots
            for part in root.modules()
            if isinstance(part, _NormBase) and not isinstance(part, nn.SyncBatchNorm)
        }
        self.sync = GradSync(kept, norms=norms.values())
        self.whole = kept
        self.refusals = Refusals("fsdp", lambda p: id(p) in self.ids)
        self.handles: list[Any] = []
        for tree in self.trees:
            tree.dress.off()

    # --- setting up ------------------------------------------------------------------------------

    def _shard(self, root: nn.Module, kept: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """One tree; returns old parameter → new one. It is dressed afterwards."""
        known = set(map(id, kept))
        before = [place for place in places([root]) if id(place[2]) not in known]
        for _, _, p in before:
            if not p.is_contiguous():
                p.data = p.data.contiguous()
        units = find_units(root, self.options.wrap)
        tree = Tree(root, units, lambda is_root: self._policies(is_root, kept))
        new: dict[int, torch.Tensor] = {}
        for part, name, old in before:
            if id(old) not in new:
                sharded = part._parameters[name]
                assert isinstance(sharded, DTensor)
                if sharded.is_meta:
                    device = "cpu" if self.options.cpu_offload else self.mesh.device_type
                    sharded = nn.Parameter(fresh_storage(sharded, torch.device(device)), old.requires_grad)  # type: ignore[arg-type]
                vars(sharded).update(vars(old))
                if old.grad is not None and not old.grad.is_sparse:
                    sharded.grad = cut(sharded, old.grad)  # type: ignore[arg-type]
                new[id(old)] = sharded
                self.replaced.append((old, sharded))
            part._parameters[name] = new[id(old)]  # type: ignore[assignment]
        tree.finish()
        tree.copy = self.copy
        if not self.options.limit_all_gathers:
            prefetch_further(part for part in root.modules() if any(part is unit for unit in units))
        self.trees.append(tree)
        self.ids |= {id(p) for p in new.values()}
        return new

    def _policies(self, is_root: bool, kept: list[torch.Tensor]) -> dict[str, Any]:
        """What `fully_shard` is told."""
        options = self.options
        chosen: dict[str, Any] = {"mesh": self.mesh}
        chosen["reshard_after_forward"] = False if options.sharding == "SHARD_GRAD_OP" else None
        if options.comm_dtype != "none":
            dtype = DTYPES[options.comm_dtype]
            chosen["mp_policy"] = (
                MixedPrecisionPolicy(reduce_dtype=dtype)
                if options.comm_dtype == "fp32"
                else MixedPrecisionPolicy(
                    param_dtype=dtype, reduce_dtype=dtype, output_dtype=torch.float32 if is_root else None
                )
            )
        if options.cpu_offload:
            chosen["offload_policy"] = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")
        if kept:
            if "ignored_params" not in inspect.signature(fully_shard).parameters:
                raise NotSupported(
                    "a parameter without dimensions (a temperature, say) needs torch 2.7 under fsdp; --strategy ddp "
                    "works with this torch"
                )
            chosen["ignored_params"] = set(kept)
        return chosen

    def copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """`copy.deepcopy(model)` in a cell: another model in pieces, which is trained, averaged and brought home as
        this one is. Nothing is communicated."""
        self._let_copies_go()
        for tree in self.trees:
            tree.reshard()
            tree.dress.off()
        try:
            twin = copy.deepcopy(module, memo)
        finally:
            for tree in self.trees:
                tree.dress.on()
        held = [(part, name, p) for part, name, p in places([twin]) if isinstance(p, DTensor)]
        shells: dict[int, nn.Parameter] = {}
        for part, name, p in held:
            shell = shells.setdefault(id(p), as_parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p))
            part._parameters[name] = shell
        told, self.replaced = self.replaced, []
        try:
            new = self._shard(twin, [p for _, _, p in places([twin]) if not p.is_meta])
        finally:
            self.replaced = told
        for p in {id(p): p for _, _, p in held}.values():
            new[id(shells[id(p)])]._local_tensor.copy_(p._local_tensor)  # type: ignore[attr-defined]
        while (name := f"{type(module).__name__}{COPY}{self.copied + 1})") in self.component.modules:
            self.copied += 1
        self.component.modules[name] = twin
        return twin

    def _let_copies_go(self) -> None:
        """Those that nobody else holds: `best = copy.deepcopy(model)` may stand in a loop. They are dressed."""
        modules = self.component.modules
        held = [(name, ref(m)) for name, m in modules.items() if COPY in name and "_nbtrain_tree" in vars(m)]
        if not held:
            return
        for name, alive in held:
            self.trees = [tree for tree in self.trees if tree.root is not alive()]
            del modules[name]
        gc.collect()
        for name, alive in held:
            if (copied := alive()) is not None:
                modules[name] = copied
                self.trees.append(vars(copied)["_nbtrain_tree"])
        self.ids = {id(p) for p in self._parameters()}

    # --- while a cell runs -----------------------------------------------------------------------

    def enter(self) -> None:
        for tree in self.trees:
            tree.dress.on()
        self.refusals = Refusals("fsdp", lambda p: id(p) in self.ids)
        self.refusals.on()
        self.handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for optimizer in self.component.optimizers.values():
            self.handles.append(optimizer.register_load_state_dict_post_hook(_cut_loaded))

    def leave(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.refusals.off()
        self._let_copies_go()
        self.reset()
        for tree in self.trees:
            tree.dress.off()

    def reset(self) -> None:
        for tree in self.trees:
            if tree.dress.worn:
                tree.calm()
        self.sync.reset()

    def _mine(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self.ids for group in optimizer.param_groups for p in group["params"][:1])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.sync.norms and self._mine(optimizer):
            with torch.no_grad():
                for held, flat, work in self.sync.launch_statistics():
                    work.wait()
                    for (norm, buffer), mean in zip(held, flat.split([b.numel() for _, b in held]), strict=True):
                        if norm.training:
                            buffer.copy_(mean.view_as(buffer))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._mine(optimizer):
            for tree in self.trees:  # what is still gathered is not what the optimizer has made of the shards
                tree.reshard()
                tree.usage.stepped()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        roots: list[Any] = [tree.root for tree in self.trees]
        with ExitStack() as stack:
            stack.enter_context(self.sync.no_sync())
            for root in roots:
                root.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                for root in roots:
                    root.set_requires_gradient_sync(True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients are added up whole, on every rank, until the next backward that is communicated."""
        return self._unsynced()

    def rescale(self, factor: float) -> None:
        """What `no_sync` holds back counts so much."""
        for tree in self.trees:
            for group in tree.groups():
                for param in group.fsdp_params:
                    if param.unsharded_accumulated_grad is not None:
                        param.unsharded_accumulated_grad.mul_(factor)
                    if hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None:
                        param._unsharded_param.grad.mul_(factor)

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor | None:
        """torch's own would return a DTensor, which cannot be formatted, and knows nothing of loose parameters."""
        held = list(parameters)
        if not any(id(p) in self.ids for p in held):
            self.sync.catch_up(held)
            return None
        self.sync.catch_up(held)
        norm_type = float(norm_type)
        parts = [p.grad._local_tensor for p in held if isinstance(p.grad, DTensor)]
        rest = [p.grad for p in held if p.grad is not None and not isinstance(p.grad, DTensor)]
        here = sum_of_powers(parts, norm_type).to(self.mesh.device_type)
        largest = norm_type == float("inf")
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(here, op=operation, group=self.mesh.get_group(self.mesh.ndim - 1))
        others = sum_of_powers(rest, norm_type).to(here.device)
        total = torch.maximum(here, others) if largest else (here + others) ** (1 / norm_type)
        total = total.to(torch.float32 if all(g.dtype != torch.float64 for g in (*parts, *rest)) else torch.float64)
        share = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in (*parts, *rest):
            grad.mul_(share.to(grad.device, grad.dtype))
        return total.to(parts[0].device) if parts else total

    # --- between cells ---------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[torch.Tensor, Piece]]:
        yield from ((p, Rows(p)) for p in self._parameters())
        for optimizer in self.component.optimizers.values():
            yield from ((value, Rows(value)) for value in _state_tensors(optimizer))

    def _parameters(self) -> list[DTensor]:
        found = {id(p): p for tree in self.trees for p in tree.root.parameters() if isinstance(p, DTensor)}
        return list(found.values())

    def replicas(self) -> Iterator[tuple[str, torch.Tensor]]:
        mine = {id(p) for p in self.whole}
        for where, module in self.component.modules.items():
            for path, part in module.named_modules():
                at = f"{where}.{path}" if path else where
                for name, p in part.named_parameters(recurse=False):
                    if id(p) in mine:
                        yield f"{at}.{name}", p
                for name, buffer in part.named_buffers(recurse=False):
                    if not is_lazy(buffer) and not (isinstance(part, _NormBase) and name.startswith("running_")):
                        yield f"{at}.{name}", buffer
        yield from self.component.loose.items()

    def grow(self, component: Component) -> bool:
        if {id(m) for m in component.modules.values()} != {id(m) for m in self.component.modules.values()}:
            return False
        known = self.ids | {id(p) for p in self.whole}
        held = [p for o in component.optimizers.values() for group in o.param_groups for p in group["params"]]
        if any(id(p) not in known for p in (*held, *component.loose.values())):
            return False
        self.replaced = []
        before = {id(o) for o in self.component.optimizers.values()}
        same: dict[int, torch.Tensor] = {id(p): p for p in self._parameters()}
        for optimizer in component.optimizers.values():
            if id(optimizer) not in before:
                refuse_odd_state(optimizer, "fsdp", "--strategy ddp")
                self.replaced += [pair for pair in rebind(optimizer, same, _cut_state) if pair[0] is not pair[1]]
                if self.handles:
                    self.handles.append(optimizer.register_load_state_dict_post_hook(_cut_loaded))
        self.component = component
        return True

    def close(self) -> None:
        new: dict[int, torch.Tensor] = {}
        self.replaced = []
        for p in self._parameters():
            full = new[id(p)] = as_parameter(whole(p), p)
            if isinstance(p.grad, DTensor):
                full.grad = whole(p.grad)
            self.replaced.append((p, full))
        for part, name, held in places(tree.root for tree in self.trees):
            part._parameters[name] = new.get(id(held), held)  # type: ignore[assignment]
        for optimizer in self.component.optimizers.values():
            pairs = rebind(optimizer, new, lambda p, value: whole(value) if isinstance(value, DTensor) else value)
            self.replaced += [pair for pair in pairs if pair[0] is not pair[1]]
        self.drop()

    def drop(self) -> None:
        if self.handles:
            self.leave()
        self.sync.close()
        for tree in self.trees:
            tree.forget()
        self.trees = []
        self.ids = set()


def _cut_state(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    if value.is_meta:
        return fresh_storage(cut(parameter, value), parameter._local_tensor.device)
    return cut(parameter, value)


def _cut_loaded(optimizer: torch.optim.Optimizer) -> None:
    """After `load_state_dict` of a state that is whole."""
    held: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    rebind(optimizer, {key: p for key, p in held.items() if isinstance(p, DTensor)}, _cut_state)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[DTensor]:
    """In the order of the groups: that of the state is when a parameter was first stepped."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state: Any = optimizer.state.get(p)
            for key in sorted(state, key=str) if isinstance(state, dict) else ():
                if isinstance(state[key], DTensor):
                    yield state[key]


def _kept_whole(component: Component, roots: list[nn.Module]) -> list[torch.Tensor]:
    """Loose parameters, and those that cannot be divided by rows: gradients of these are averaged, as under ddp."""
    parts = [part for root in roots for part in root.modules()]
    sparse = {id(m.weight) for m in parts if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    inside = {id(p) for root in roots for p in root.parameters()}
    return [
        p for p in component.parameters() if id(p) not in inside or p.ndim == 0 or p.numel() == 0 or id(p) in sparse
    ]


def _check(component: Component, kept: list[torch.Tensor]) -> None:
    for where, module in component.modules.items():
        lazy = next((name for name, p in module.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            raise NotSupported(
                f"{where}.{lazy} has no shape yet, so that fsdp cannot divide it: call the model once on a batch in "
                "the notebook, or use --strategy ddp"
            )
    known = set(map(id, kept))
    dtypes = {p.dtype for p in component.parameters() if id(p) not in known and p.requires_grad}
    if len(dtypes) > 1:
        raise NotSupported(
            f"fsdp divides models of one dtype, and this one has {', '.join(sorted(map(str, dtypes)))}. "
            "--strategy ddp takes any"
        )


class FSDP(Strategy):
    """Every rank holds a part of the model, and sees a share of the batches."""

    takes_blanks: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        sharding: Sharding = "FULL_SHARD"
        """what is divided, and when"""
        replicas: int = 0
        """HYBRID_SHARD: how many replicas of the whole there are; ranks are divided among them"""
        wrap: Any = ()
        """classes, names of classes, a number of parameters, or a function of a module: what is gathered as one"""
        cpu_offload: bool = False
        """what is not gathered waits in main memory, where the optimizer steps, too"""
        comm_dtype: Dtype = "none"
        """weights are gathered and gradients reduced in this"""
        limit_all_gathers: bool = True
        """one unit is gathered ahead; otherwise two"""

        def __post_init__(self) -> None:
            check_rule(self.wrap)
            if self.sharding == "HYBRID_SHARD" and self.replicas < 1:
                raise UsageError("--sharding HYBRID_SHARD needs --replicas N: how many replicas the ranks form")
            if self.replicas and self.sharding != "HYBRID_SHARD":
                raise UsageError(f"--replicas is for --sharding HYBRID_SHARD; {self.sharding} has none")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._meshes: dict[str, tuple[Any, DeviceMesh]] = {}

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to share with
            return Prepared(component)
        on_cards = any(p.is_cuda for p in component.parameters()) or dist.get_backend() == "nccl"
        return Sharded(component, self.options, self._mesh("cuda" if on_cards else "cpu"))

    def _mesh(self, kind: str) -> DeviceMesh:
        group, mesh = self._meshes.get(kind, (None, None))
        if mesh is None or group is not dist.group.WORLD:  # a group that was formed anew needs a mesh of its own
            count = dist.get_world_size()
            replicas = {"HYBRID_SHARD": self.options.replicas, "NO_SHARD": count}.get(self.options.sharding, 1)
            if count % replicas:
                raise UsageError(f"--replicas {replicas}: {count} ranks cannot be divided into {replicas} equal parts")
            shape, names = (
                ((count,), ("ranks",)) if replicas == 1 else ((replicas, count // replicas), ("replicas", "ranks"))
            )
            mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
            self._meshes[kind] = (dist.group.WORLD, mesh)
        return mesh
