"""Makes and drops copies of models in pieces: `copy.deepcopy(model)` in a cell, for an average or the best weights.

A copy is another model in pieces, which is trained, averaged and brought home as its original is. Nothing is
communicated. It joins the modules of the component under a name of its own, and leaves them when nobody holds it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.compat.modules import parameters
from nbtrain.strategies.fsdp.fully_shard import ShardedTree
from nbtrain.strategies.fsdp.whole_values import mean_of_ranks
from nbtrain.strategies.kit.row_shards import as_parameter, places

COPY = " (copy "
"""part of the names of modules that a cell has copied"""

Shard = Callable[[nn.Module, list[torch.Tensor], dict[int, Any]], dict[int, torch.Tensor]]
Modules = dict[str, nn.Module]


def make_copy(module: nn.Module, memo: dict[int, Any], trees: list[ShardedTree], shard: Shard) -> nn.Module:
    """A copy of a module. `trees`: those in which it may be, with their attachments on. `shard(root, whole, pieces)`:
    sets up another root, all of whose parameters but the `whole` ones have no memory; `pieces` take their places, by
    their ids. Those are the copies that `deepcopy` made: an optimizer that is copied with the model has them, too."""
    for tree in trees:
        tree.reshard()
        tree.take_off()
    try:
        twin = copy.deepcopy(module, memo)
    finally:
        for tree in trees:
            tree.put_on()
    sharded = [(part, name, p) for part, name, p in places([twin]) if isinstance(p, DTensor)]
    shells: dict[int, nn.Parameter] = {}
    for part, name, p in sharded:
        shell = shells.setdefault(id(p), as_parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p))
        parameters(part)[name] = shell
    for _, _, p in sharded:
        p.grad = None  # a copied parameter has none
    full = [p for _, _, p in places([twin]) if not p.is_meta]
    shard(twin, full, {id(shells[id(p)]): p for _, _, p in sharded})
    return twin


def average_whole(twin: nn.Module) -> list[Any]:
    """Have the gradients of parameters averaged that every rank has whole: the others' are sent in pieces. Returns
    handles."""
    whole = [p for p in twin.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    return [p.register_post_accumulate_grad_hook(_average) for p in whole]


def _average(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.copy_(mean_of_ranks(p.grad))


def add_copy(modules: Modules, twin: nn.Module, number: int) -> int:
    """Add it under the first free name from that number on; returns the number it got."""
    while (name := f"{type(twin).__name__}{COPY}{number})") in modules:
        number += 1
    modules[name] = twin
    return number


def let_copies_go(modules: Modules, trees: list[ShardedTree]) -> list[ShardedTree]:
    """Drop the copies that nobody else holds: `best = copy.deepcopy(model)` may stand in a loop. Their attachments are
    on. Only the caller holds `trees`, which is emptied. Returns the trees that are left."""
    copies = [(name, ref(m)) for name, m in modules.items() if COPY in name and "_nbtrain_tree" in vars(m)]
    left = [tree for tree in trees if not any(tree.root is alive() for _, alive in copies)]
    trees.clear()
    for name, _ in copies:
        del modules[name]
    if copies:
        gc.collect()
    for name, alive in copies:
        if (copied := alive()) is not None:
            modules[name] = copied
            left.append(vars(copied)["_nbtrain_tree"])
    return left
