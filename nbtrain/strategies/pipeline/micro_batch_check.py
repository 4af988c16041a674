"""Whether a model gives for the micro-batches what it gives for the batch: looked at once for each kind of call.

Cutting along dimension 0 is right for most models, and silently wrong for some: where the batch is another dimension,
or samples see each other. So before batches of a kind are cut for the first time, one goes through the stages uncut and
then cut, evaluated and without gradients, and the results are compared. Nothing of it stays.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.compat import pytree, tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.split_batch import alike
from nbtrain.strategies.pipeline.forward_program import Program
from nbtrain.strategies.pipeline.micro_batches import Cut, join
from nbtrain.strategies.pipeline.record_forward import attributes_of, restore
from nbtrain.strategies.pipeline.run_micro_batches import meet, plan_of
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_messages import packed

COMPARED = 1
"""no plan of a call, but one that is looked at"""
PLAIN = (int, float, str, bool, bytes, type(None), torch.Size)


@contextmanager
def evaluated(root: nn.Module) -> Iterator[None]:
    """Without gradients, too."""
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def fits(
    place: StagePlace, root: nn.Module, name: str, programs: list[Program], batches: list[list[Any]], cut: Cut
) -> bool:
    """`programs` and `batches`: of the batch, and then of each micro-batch; for `evaluated`. Collective; all ranks are
    told the same."""
    meet(place, batches[0], name, plan_of(programs) ^ COMPARED)
    share = place.channel.share
    with _nothing_stays(place, root):
        found = [_through(place, *one) for one in zip(programs, batches, strict=True)]
        place.channel.settle()
        last = place.rank == place.last
        same = share(_compared(found[0], found[1:], cut, name) if last else None, place.last)
        if same is None:  # it is drawn, perhaps; then nothing can be said
            again = _through(place, programs[0], batches[0])
            place.channel.settle()
            same = share(last and not _same(found[0], again), place.last)
    return bool(same)


def _through(place: StagePlace, program: Program, given: list[Any]) -> Any:
    """One run through the stages. On the last rank what comes of it; a sentence if some stage could not do it: the next
    ones do not wait for it."""
    rank = place.rank
    found = place.channel.receive(rank - 1) if rank else []
    if not isinstance(found, str):
        given = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given)  # it may be edited in place
        values = dict(enumerate(given))
        if rank:
            values.update(zip(program.crossing[rank - 1], found, strict=True))
        try:
            with place.computing(False):
                program.run(rank, values)
                ends = place.last == rank
                found = program.result(values) if ends else [values[n] for n in program.crossing[rank]]
        except Exception as error:  # whatever the user's modules say of these
            found = f"{type(error).__name__}: {error}"
    if rank != place.last:
        try:
            message = packed(found)
        except NotSupported as error:  # the call itself is about to say so
            message = packed(str(error))
        place.channel.put(message, rank + 1)
    return found


def _compared(whole: Any, parts: list[Any], cut: Cut, name: str) -> bool | None:
    """None: the numbers are others."""
    if isinstance(whole, str):  # it cannot be evaluated; or the call itself is about to say so
        return True
    if any(isinstance(part, str) for part in parts):
        return False
    try:
        joined = join(parts, cut, name).output
    except NotSupported:
        return False
    form, joined_form = ([_form(leaf) for leaf in pytree.tree_leaves(one)] for one in (whole, joined))
    if form != joined_form:
        return False
    return True if _same(whole, joined) else None


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def _same(one: Any, other: Any) -> bool:
    """Whether values of the same structure are equal."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(alike([_coarse(a), _coarse(b)]) for a, b in pairs if isinstance(a, torch.Tensor))


def _coarse(tensor: torch.Tensor) -> torch.Tensor:
    """As exact as it was computed: under autocast what is 32 bits wide was made of 16, too."""
    rough = tensor.is_floating_point() and torch.is_autocast_enabled(tensor.device.type)
    return tensor.to(torch.bfloat16) if rough else tensor


@contextmanager
def _nothing_stays(place: StagePlace, root: nn.Module) -> Iterator[None]:
    """No random number, no print, no buffer or attribute. Where the user has hooks, nothing is compared."""
    numpy: Any = sys.modules.get("numpy")
    drawn, drawn_too = random.getstate(), numpy.random.get_state() if numpy else None
    random_state, place.random_state.states = place.random_state.states, list(place.random_state.states)
    attributes = attributes_of(root)
    with tensors.as_plain_tensors():
        buffers = [(b, tensors.version(b), b.detach().clone()) for b in root.buffers()]
    lists = [(v, v.copy()) for m in root.modules() for v in vars(m).values() if type(v) in (list, dict, set)]
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # it would keep weights without a graph, and use them afterwards
    cuda: list[int] | None = None if place.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        restore(attributes, set())
        for held, before in lists:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(before)
        with tensors.as_plain_tensors():
            for buffer, version, numbers in buffers:
                if tensors.version(buffer) != version:
                    buffer.copy_(numbers)
        place.random_state.states = random_state
        random.setstate(drawn)
        if numpy:
            numpy.random.set_state(drawn_too)
