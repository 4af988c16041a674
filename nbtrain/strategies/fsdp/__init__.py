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

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbtrain.base.errors import UsageError
from nbtrain.strategies.base import Component, Facts, Prepared, Strategy
from nbtrain.strategies.fsdp import estimate
from nbtrain.strategies.fsdp.prepared import PreparedFSDP
from nbtrain.strategies.kit import dtensor_operations
from nbtrain.strategies.kit.gradient_buckets import Dtype
from nbtrain.strategies.kit.units_to_wrap import check_rule
from nbtrain.strategies.memory_estimate import Estimate, Profile, World

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]

RANKS = "nbtrain_replicas", "nbtrain_ranks"
"""dimensions of the mesh; see `MESH` in kit/collective_calls.py"""


class FSDP(Strategy):
    """Every rank holds a part of the model, and sees a share of the batches."""

    facts = Facts(empty_weights="meta")

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options:
        sharding: Sharding = "FULL_SHARD"
        """what is divided, and when"""
        replicas: int = 0
        """HYBRID_SHARD: how many replicas of the whole there are; ranks are divided among them"""
        wrap: Any = ()
        """what is gathered as one: classes or names, a number of parameters, or a function of a module"""
        cpu_offload: bool = False
        """what is not gathered waits in main memory, where the optimizer steps, too"""
        comm_dtype: Dtype = "none"
        """weights are gathered and gradients reduced in this"""
        limit_all_gathers: bool = True
        """one unit is gathered ahead; otherwise two"""

        @classmethod
        def for_nodes(cls, options: dict[str, Any], nodes: int) -> dict[str, Any]:
            hybrid = options.get("sharding") == "HYBRID_SHARD" and "replicas" not in options
            return {**options, "replicas": nodes} if hybrid else options

        def __post_init__(self) -> None:
            check_rule(self.wrap)
            if self.sharding == "HYBRID_SHARD" and self.replicas < 1:
                raise UsageError(
                    "--sharding HYBRID_SHARD needs --replicas N: how many replicas the ranks form; with --nodes N it "
                    "is one a node"
                )
            if self.replicas and self.sharding != "HYBRID_SHARD":
                raise UsageError(f"--replicas is for --sharding HYBRID_SHARD; {self.sharding} has none")

    def __init__(self, options: Any = None, **given: Any) -> None:
        super().__init__(options, **given)
        self._meshes: dict[str, tuple[Any, DeviceMesh]] = {}

    def estimate(self, profile: Profile, world: World) -> Estimate:
        return estimate.estimate(self.options, profile, world)

    def running(self) -> AbstractContextManager[None]:
        dtensor_operations.begin()
        return super().running()

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to share with
            return Prepared(component)
        on_cards = any(p.is_cuda for p in component.parameters()) or dist.get_backend() == "nccl"
        return PreparedFSDP(component, self.options, self._mesh("cuda" if on_cards else "cpu"))

    def _mesh(self, kind: str) -> DeviceMesh:
        group, mesh = self._meshes.get(kind, (None, None))
        if mesh is None or group is not dist.group.WORLD:  # a group that was formed anew needs a mesh of its own
            count = dist.get_world_size()
            among = estimate.shards(self.options, count)
            shape, names = ((count,), RANKS[1:]) if among == count else ((count // among, among), RANKS)
            mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
            self._meshes[kind] = (dist.group.WORLD, mesh)
        return mesh
