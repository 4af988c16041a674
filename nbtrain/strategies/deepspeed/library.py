"""DeepSpeed itself: imported quietly, on this rank's device and process group, and put right where it needs to be.

`replaced_functions.TABLE` says which of its functions are replaced, and why.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import UsageError, VersionMismatch
from nbtrain.compat import deepspeed as ds
from nbtrain.compat import python, strategy_packages
from nbtrain.compat.intercept import Listeners, While, listening
from nbtrain.compat.internals import find
from nbtrain.machine import registry
from nbtrain.strategies.deepspeed import compiled_ops
from nbtrain.strategies.deepspeed.quiet import quiet

COLLAPSED = "nbtrain_collapsed"
"""The attribute of a parameter that says what it shows while it is in pieces."""

_listeners = Listeners()
_inside: list[object] = []
_before: dict[str, str | None] = {}
"""environment variables before the first `as_local_rank`"""

_group: Any = None
"""the process group that DeepSpeed was told of"""


def library(device: torch.device) -> Any:
    """The module `deepspeed`, ready for engines on this device and the process group there is now."""
    global _group
    deepspeed = imported(device)
    world = dist.group.WORLD
    if _group is not world:  # it was formed anew: what DeepSpeed remembers of groups is of the old one
        with quiet():
            # torch's functions as they are when they are called: who watches over what ranks enter, so that nobody
            # waits for one that has gone another way, is to see these, too.
            ds.use_group(world, _late("all_gather_into_tensor"), _late("reduce_scatter_tensor"))
        _group = world
    _number_alike()
    return deepspeed


def _number_alike() -> None:
    """Stage 3 numbers parameters and modules as long as a process lives, and compares the numbers between ranks: one
    that has taken a dead one's place would begin at zero. Collective."""
    counts = torch.tensor(ds.counts())
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    ds.set_counts(*counts.tolist())


def imported(device: torch.device) -> Any:
    """The module `deepspeed`, imported for this kind of device; that takes two seconds the first time."""
    if reason := registry.missing(registry.STRATEGIES["deepspeed"].needs):
        raise UsageError(f"--strategy deepspeed: {reason}")
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = before or ("cuda" if device.type == "cuda" else "cpu")
    try:
        with quiet():
            deepspeed = import_module("deepspeed")
            import_module("deepspeed.accelerator").get_accelerator()
            _put_right()
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
    return deepspeed


@functools.cache
def _put_right() -> None:
    """Replace functions of DeepSpeed, for the life of the process."""
    _listeners.listen(ds.JIT_LOAD, "deepspeed", compiled_ops.not_compiled_here)
    _listeners.listen(ds.BUILD_SHM, "deepspeed", lambda old: lambda: None)
    with listening("torch.compile", "deepspeed", lambda old: _as_it_is):
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    if reason := strategy_packages.refusal("deepspeed", ["deepspeed"], "fsdp"):
        raise VersionMismatch(reason)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # DeepSpeed's calls, on every rank
        python.ignore_always(rf"`torch\.distributed\.{name}` is deprecated", FutureWarning)
    _listeners.listen(ds.EMPTY_PARAMETER, "deepspeed", _collapsed)
    _listeners.listen(ds.CUT_TO_BLOCKS, "deepspeed", _aligned)


def _put_linear(listeners: Listeners) -> None:
    theirs = find(ds.LINEAR)
    listeners.listen("torch.nn.functional.linear", "deepspeed", lambda old: theirs)


linear: While[object] = While(_put_linear)
"""Engines of stage 3 whose cells run: a linear layer then keeps its weight for the backward, and not a view of the
gathered one, whose memory would stay."""


def _collapsed(old: Callable[..., Any]) -> Callable[..., Any]:
    """`sum(p.numel() for p in …)` is right, and a penalty on weights outside of the model's forward is seen instead of
    being 0."""

    def free_param(parameter: Any) -> None:
        old(parameter)
        collapsed = vars(parameter).get(COLLAPSED)
        if collapsed is not None:
            parameter.data = collapsed

    return free_param


def _aligned(old: Callable[..., Any]) -> Callable[..., Any]:
    """It reads a gradient from the disk straight to its place among others. Where that is not a multiple of 512 bytes
    the system refuses, and nobody looks: steps were taken with what had been there before. What is in front of such a
    multiple stays in memory."""

    def cut(swapper: Any, tensors: list[torch.Tensor], offsets: list[int]) -> Any:
        pieces, places = [], []
        for tensor, offset in zip(tensors, offsets, strict=True):
            head = min(-offset % swapper.numel_alignment, tensor.numel())
            pieces += [tensor[:head], tensor[head:]]
            places += [offset, offset + head]
        some = [i for i, piece in enumerate(pieces) if piece.numel()]
        return old(swapper, [pieces[i] for i in some], [places[i] for i in some])

    return cut


def _late(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(dist, name)(*args, **kwargs)

    return call


def _as_it_is(model: Any = None, **_: Any) -> Any:
    return model if model is not None else _as_it_is


@contextlib.contextmanager
def equal_already() -> Iterator[None]:
    """Around `initialize`, which would send every weight from rank 0 to all, under stage 3 twice: they have been
    compared. Those that are filled in later (`nbtrain.empty()`) have no memory that could be sent."""
    with listening(ds.SEND_WEIGHTS, "deepspeed", _not_at_all), listening(ds.SEND_WEIGHT, "deepspeed", _only_cut):
        yield


def _not_at_all(old: Callable[..., Any]) -> Callable[..., Any]:
    return lambda engine: None


def _only_cut(old: Callable[..., Any]) -> Callable[..., Any]:
    def cut(init: Any, parameter: Any) -> None:
        ds.cut_up(init, parameter)

    return cut


@contextlib.contextmanager
def as_local_rank(device: torch.device) -> Iterator[None]:
    """DeepSpeed takes the card whose index is LOCAL_RANK; this rank's may be another one. Several may be inside, and
    leave in any order: the last one puts back what was there before."""
    wanted = {"LOCAL_RANK": str(device.index or 0) if device.type == "cuda" else os.environ.get("LOCAL_RANK", "0")}
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        wanted.setdefault(name, str(value))
    if not _inside:
        _before.update({name: os.environ.get(name) for name in wanted})
    here = object()
    _inside.append(here)
    os.environ.update(wanted)
    try:
        yield
    finally:
        _inside.remove(here)
        for name, old in () if _inside else _before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


def destroy(engine: Any) -> None:
    """An engine's hooks, threads and what DeepSpeed's modules still know of it. Not collective."""
    try:
        engine.destroy()
    finally:
        ds.forget_module(engine.module)
