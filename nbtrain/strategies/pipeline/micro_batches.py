"""A batch cut into micro-batches, what came of them put together, and whether that is what comes of the batch.

The batch is dimension 0. A tensor that is given and has another size there (a mask) goes to every micro-batch whole.

That is right for most models, and silently wrong for some: where the batch is another dimension, or samples see each
other. So before batches of a kind are cut for the first time, one goes through the stages uncut and then cut, evaluated
and without gradients, and the results are compared. Nothing of it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported, text_of
from nbtrain.compat import pytree
from nbtrain.strategies.kit.split_batch import alike, nothing_happens
from nbtrain.strategies.pipeline.forward_program import Program, plan_of
from nbtrain.strategies.pipeline.module_state import ModuleState
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_messages import packed

OTHERWISE = (
    "{name} returns something else for one micro-batch than for another, and under pipeline what it returns for all of "
    "them is put together: let it return the same things for every batch, write --microbatches 1, or use --strategy ddp"
)
COMPARED = 1
"""no plan of a call, but one that is looked at"""
PLAIN = (int, float, str, bool, bytes, type(None), torch.Size)


@dataclass(slots=True)
class BatchCut:
    """How a batch is cut."""

    sizes: list[int]
    """of the micro-batches; [0] where nothing says how large the batch is"""

    @classmethod
    def of(cls, leaves: list[Any], wanted: int, ranks: int) -> BatchCut:
        """`wanted`: micro-batches; 0: four for each rank, if that leaves two samples for each."""
        batch = next((t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.dim()), 0)
        count = min(wanted or max(1, min(4 * ranks, batch // 2)), batch)
        if count <= 1:
            return cls([batch])
        small, more = divmod(batch, count)
        return cls([small + (i < more) for i in range(count)])

    @property
    def batch(self) -> int:
        return sum(self.sizes)

    def apply(self, leaf: Any) -> list[Any]:
        """One argument of the model, for each micro-batch."""
        uncut = not (isinstance(leaf, torch.Tensor) and self.cuts(leaf))
        return [leaf] * len(self.sizes) if uncut else list(leaf.split(self.sizes))

    def joins(self, parts: list[list[torch.Size]], full: list[torch.Size]) -> bool:
        """Whether tensors of these shapes, of each micro-batch, make up those of the whole batch."""
        wanted = [[(size, *shape[1:]) if shape else () for shape in full] for size in self.sizes]
        fit = all(shape and shape[0] == self.batch for shape in full)
        return fit and [[tuple(shape) for shape in part] for part in parts] == wanted

    def cuts(self, leaf: torch.Tensor) -> bool:
        """Not what is sparse, as a graph's adjacency: it belongs to all of a batch."""
        strided = leaf.layout is torch.strided
        return len(self.sizes) > 1 and strided and leaf.dim() > 0 and leaf.shape[0] == self.batch


@dataclass(slots=True)
class Joined:
    """What the micro-batches returned, as one."""

    output: Any
    differ: list[bool]
    """which of its leaves have a gradient"""

    @property
    def leaves(self) -> list[Any]:
        leaves: list[Any] = pytree.tree_leaves(self.output)
        return leaves


def join(parts: list[Any], cut: BatchCut, name: str) -> Joined:
    """`parts`: what the model returned for each micro-batch."""
    flat = [pytree.tree_flatten(part) for part in parts]
    if any(tree != flat[0][1] for _, tree in flat):
        raise NotSupported(OTHERWISE.format(name=name))
    leaves: list[Any] = []
    differ = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        tensors = [isinstance(leaf, torch.Tensor) for leaf in column]
        if any(tensors) and not all(tensors):
            raise NotSupported(OTHERWISE.format(name=name))
        differ.append(tensors[0] and any(t.requires_grad for t in column))
        leaves.append(_join(column, cut, name) if tensors[0] else column[0])
    return Joined(pytree.tree_unflatten(leaves, flat[0][1]), differ)


def _join(column: tuple[Any, ...], cut: BatchCut, name: str) -> torch.Tensor:
    pieces: list[torch.Tensor] = [t.detach() for t in column]
    if len(pieces) == 1:
        return pieces[0].clone()
    rows = all(t.dim() and t.shape[0] == size for t, size in zip(pieces, cut.sizes, strict=True))
    if rows and len({t.shape[1:] for t in pieces}) == 1:
        return torch.cat(pieces)
    raise NotSupported(
        f"{name} returns a tensor of the shape {tuple(pieces[0].shape)} for {cut.sizes[0]} samples, and under pipeline "
        "what it returns for several micro-batches is put together along dimension 0, which must be that of the "
        "batch: write --microbatches 1, or use --strategy ddp"
    )


def gradients(grads: list[Any], cut: BatchCut) -> list[list[Any]]:
    """The gradients of each micro-batch's outputs, from those of the whole batch."""
    columns: list[list[Any]] = []
    for grad in grads:
        if grad is None:
            columns.append([None] * len(cut.sizes))
        else:
            columns.append([grad] if len(cut.sizes) == 1 else list(grad.split(cut.sizes)))
    return [[column[i] for column in columns] for i in range(len(cut.sizes))]


# --- whether a batch can be cut ------------------------------------------------------------------


@contextmanager
def evaluated(root: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in root.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def fits(
    place: StagePlace, root: nn.Module, name: str, programs: list[Program], batches: list[list[Any]], cut: BatchCut
) -> bool:
    """`programs` and `batches`: of the batch, and then of each micro-batch; for `evaluated`. Collective; all ranks are
    told the same."""
    place.meet(name, batches[0], plan_of(programs) ^ COMPARED)
    share = place.channel.share
    given = [leaf for leaf in batches[0] if isinstance(leaf, torch.Tensor)]
    with _nothing_stays(place, root), nothing_happens(given, place.device.type == "cuda"):
        outputs = [_through(place, *program_and_batch) for program_and_batch in zip(programs, batches, strict=True)]
        place.channel.settle()
        last = place.rank == place.last
        same = share(_compared(outputs[0], outputs[1:], cut, name) if last else None, place.last)
        if same is None:  # it is drawn, perhaps; then nothing can be said
            again = _through(place, programs[0], batches[0])
            place.channel.settle()
            same = share(last and not _same(outputs[0], again), place.last)
    return bool(same)


def _through(place: StagePlace, program: Program, given: list[Any]) -> Any:
    """One run through the stages. On the last rank what comes of it; a sentence if some stage could not do it: the next
    ones do not wait for it."""
    rank = place.rank
    passed = place.channel.receive(rank - 1) if rank else []
    if not isinstance(passed, str):
        given = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), given)  # it may be edited in place
        values = dict(enumerate(given))
        if rank:
            values.update(zip(program.crossing[rank - 1], passed, strict=True))
        try:
            with place.computing(False):
                program.run(rank, values)
                ends = place.last == rank
                passed = program.result(values) if ends else [values[n] for n in program.crossing[rank]]
        except Exception as error:  # whatever the user's modules say of these
            passed = f"{type(error).__name__}: {text_of(error)}"
    if rank != place.last:
        try:
            message = packed(passed)
        except NotSupported as error:  # the call itself is about to say so
            message = packed(str(error))
        place.channel.put(message, rank + 1)
    return passed


def _compared(full: Any, parts: list[Any], cut: BatchCut, name: str) -> bool | None:
    """None: the numbers are others."""
    if isinstance(full, str):  # it cannot be evaluated; or the call itself is about to say so
        return True
    if any(isinstance(part, str) for part in parts):
        return False
    try:
        joined = join(parts, cut, name).output
    except NotSupported:
        return False
    form, joined_form = ([_form(leaf) for leaf in pytree.tree_leaves(output)] for output in (full, joined))
    if form != joined_form:
        return False
    return True if _same(full, joined) else None


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def _same(output: Any, other: Any) -> bool:
    """Whether values of the same structure are equal."""
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(other), strict=True)
    return all(alike([a, b]) for a, b in pairs if isinstance(a, torch.Tensor))


@contextmanager
def _nothing_stays(place: StagePlace, root: nn.Module) -> Iterator[None]:
    """No buffer or attribute. Where the user has hooks, nothing is compared."""
    random_state, place.random_state.states = place.random_state.states, list(place.random_state.states)
    before = ModuleState(root.modules())
    try:
        yield
    finally:
        before.put_back()
        place.random_state.states = random_state
