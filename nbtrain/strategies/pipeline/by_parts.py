"""Parts of a model in stages that a cell calls by itself: `model.encode(x)`, `model.blocks[1](h)`, a whole forward that
cannot be cut.

Each rank runs the same code. Where it comes to a part, the part's owner computes it, and what it returns goes to all;
in the backward the owner has the graph, and the gradients of what the part was given go to all. Outside of parts every
rank has all numbers and does everything itself, so that what a loop does between them is right whatever it is. Slow:
the stages wait for each other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat import autograd_engine, compiler, layers, modules, pytree, tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.pipeline.autograd_calls import AGAIN
from nbtrain.strategies.pipeline.cut_stages import has_users_hook
from nbtrain.strategies.pipeline.stage import StagePlace
from nbtrain.strategies.pipeline.stage_messages import (
    MemoryLayout,
    StageFailure,
    advising,
    fingerprint,
    heads,
    meet,
    pickled,
    read_bytes,
)

IN_PLACE = (
    "{name} changes a tensor that it is given in place, which under pipeline the other ranks would not see: let it "
    "make a new one (inplace=False), or use --strategy ddp"
)
UNSENDABLE = (
    "what {name} returns cannot be sent to the other ranks under pipeline ({why}): return tensors in tuples, lists or "
    "dicts, or use --strategy ddp"
)
APART = (
    "the ranks call different things, or {name} with different batches: under pipeline every rank sees the same ones, "
    "and calls the same parts of a model in the same order. Do it on every rank, not below `if rank == 0:`, let "
    "nothing of a batch depend on the rank, and let no rank draw random numbers alone (below `if rank == 0:` write "
    "`with torch.random.fork_rng():` around it); or use --strategy ddp"
)


class ByParts:
    """The parts of a component's models. `enter` and `leave` with each cell; what was computed outlives a pause."""

    def __init__(
        self, parts: Iterable[tuple[nn.Module, int]], place: StagePlace, look: Callable[[], None] = lambda: None
    ) -> None:
        """`parts`: (module, the rank that owns it). `look`: calls `take` where hooks of the user's have come or
        gone."""
        self.parts: dict[int, tuple[nn.Module, int]] = {}
        self.place = place
        self.look = look
        self._replaced_classes: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []
        self.take(parts)

    def take(self, parts: Iterable[tuple[nn.Module, int]]) -> None:
        """These are the parts from now on."""
        entered = bool(self._replaced_classes)
        self.leave()
        # Without anything to hold, a module is none of a rank's: it is run by all, with the random state of all.
        self.parts = {id(m): (m, owner) for m, owner in parts if _has_tensors(m)}
        self.numbers = {number: i for i, number in enumerate(self.parts)}
        if entered:
            self.enter()

    def enter(self) -> None:
        self.leave()
        for module, _ in self.parts.values():
            plain = type(module)
            part_class = self._part_class(plain)
            module.__class__ = part_class
            self._replaced_classes.append((module, plain, part_class))

    def leave(self) -> None:
        """Also after a cell that was cut short in the middle of a part."""
        while self._replaced_classes:
            module, plain, part_class = self._replaced_classes.pop()
            if type(module) is part_class:
                module.__class__ = plain

    def _part_class(self, plain: type[nn.Module]) -> type[nn.Module]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return plain.__call__(module, *args, **kwargs)

        def call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            as_it_is = partial(layers.call_as_class_does, plain, module)
            if self.place.busy:
                return as_it_is(*args, **kwargs)
            self.look()  # this module may have got a hook inside, and be no part any more
            if id(module) not in self.parts:
                return as_it_is(*args, **kwargs)
            if has_users_hook(module):  # they run on every rank, and its forward on its own
                with self._own_forward(module):
                    return as_it_is(*args, **kwargs)
            return self._call(module, as_it_is, args, kwargs)

        @wraps(plain.forward)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            as_it_is = partial(plain.forward, module)
            if self.place.busy or id(module) not in self.parts or not has_users_hook(module):
                return as_it_is(*args, **kwargs)
            return self._call(module, as_it_is, args, kwargs)

        def reduce(module: nn.Module, version: int) -> Any:
            return _rebuild, (plain, dict(vars(module)))

        compiler.mark_outside_graphs(call)  # it has its own class for a compiler to see
        body = {
            "__call__": call,  # below it is what `--precision` does around calls: that is to be done on all ranks
            modules.CALL: call_impl,
            "forward": forward,
            "__reduce_ex__": reduce,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
        }
        return type(plain.__name__, (plain,), body)

    def _call(self, module: nn.Module, as_it_is: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        _, owner = self.parts[id(module)]
        leaves, tree = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        call = PartCall(self.place, module, as_it_is, owner, leaves, tree)
        # Who takes over what the owner returns is to have asked for that.
        number = fingerprint(given, self.numbers[id(module)] + 1)
        meet(self.place.failures, call.device, {APART.format(name=call.name): number})
        anchor = torch.zeros((), requires_grad=True)
        outputs = PartFunction.apply(call, torch.is_grad_enabled(), anchor, *given)
        made = iter(outputs)
        return pytree.tree_map(lambda leaf: next(made) if leaf is TENSOR else leaf, call.returned)

    @contextmanager
    def _own_forward(self, module: nn.Module) -> Iterator[None]:
        """A forward that hangs on the module itself, past its class, is the owner's meanwhile."""
        attributes = vars(module)
        own = attributes.get("forward")
        if own is None:
            yield
            return
        attributes["forward"] = lambda *args, **kwargs: self._call(module, own, args, kwargs)
        try:
            yield
        finally:
            attributes["forward"] = own


class TensorMark:
    """Stands where a tensor was."""

    def __reduce__(self) -> str:
        return "TENSOR"


TENSOR = TensorMark()


class PartCall:
    """One call of one part, on one rank."""

    def __init__(
        self,
        place: StagePlace,
        module: nn.Module,
        as_it_is: Callable[..., Any],
        owner: int,
        leaves: list[Any],
        tree: Any,
    ) -> None:
        self.place = place
        self.name = type(module).__name__
        self.device = next(iter([*module.parameters(), *module.buffers()])).device
        self.as_it_is = as_it_is
        self.owner = owner
        self.mine = owner == place.rank
        self.leaves = leaves
        self.tree = tree
        self.returned: Any = None
        """with TENSOR in the places of tensors"""
        self.kept: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        """on the owner: what its graph starts from, and where it ends"""

    # --- forward -------------------------------------------------------------------------------

    def forward(self, given: list[torch.Tensor], graph: bool) -> tuple[list[torch.Tensor], list[bool]]:
        """What it returned, and which of that has a gradient, on every rank."""
        outputs, said = self._compute(given, graph) if self.mine else ([], b"")
        said = self._tell(said)
        refused, self.returned, layouts = pickle.loads(said)
        if isinstance(refused, StageFailure):
            self.place.failures.fail(refused)
        if refused:
            raise NotSupported(refused)
        sizes = [one.bytes for one in layouts]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        parts = buffer.split(sizes)
        if self.mine:
            for part, out, layout in zip(parts, outputs, layouts, strict=True):
                part.copy_(layout.flat(out).view(torch.uint8))
        if buffer.numel():
            self._broadcast(buffer)
        if not self.mine:
            outputs = [layout.of_bytes(part) for part, layout in zip(parts, layouts, strict=True)]
        return outputs, [layout.has_gradient for layout in layouts]

    def _compute(self, given: list[torch.Tensor], graph: bool) -> tuple[list[torch.Tensor], bytes]:
        starts = [t.detach().requires_grad_(graph and t.requires_grad) for t in given]
        before = [_version(t) for t in given]
        try:
            with self.place.computing(graph):
                handed = iter([EditedAlias.apply(s) if s.requires_grad else s for s in starts])
                args, kwargs = pytree.tree_unflatten(
                    [next(handed) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves], self.tree
                )
                returned = self.as_it_is(*args, **kwargs)
        except Exception as error:  # whatever the user's module raises: the others wait for what it returns
            return [], pickle.dumps((self.place.failures.take(error), None, []))
        outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        refused = ""
        if [_version(t) for t in given] != before:
            refused = IN_PLACE.format(name=self.name)
        thick = all(out.layout is torch.strided for out in outputs)
        if not thick:
            refused = UNSENDABLE.format(name=self.name, why="a sparse tensor")
        layouts = [MemoryLayout(out) for out in outputs] if thick else []
        others = pytree.tree_map(lambda leaf: TENSOR if isinstance(leaf, torch.Tensor) else leaf, returned)
        try:
            said = pickled((refused, others, layouts))
        except Exception as error:  # whatever an object of the user's says
            said = pickle.dumps((UNSENDABLE.format(name=self.name, why=error), None, []))
        if any(out.requires_grad for out in outputs):
            self.kept = starts, outputs
        taken = {t.untyped_storage().data_ptr() for t in given if t.layout is torch.strided}
        return [_of_its_own(out.detach(), taken) for out in outputs], said

    def _tell(self, said: bytes) -> bytes:
        """The owner's, on all ranks."""
        if not self.mine:
            return read_bytes(self._broadcast, self.device)
        for head in heads(said, self.device):
            self._broadcast(head)
        return said

    def _broadcast(self, buffer: torch.Tensor) -> None:
        """The owner's bytes go to all."""
        with advising():
            dist.broadcast(buffer, self.owner)

    # --- backward ------------------------------------------------------------------------------

    def backward(self, grads: list[torch.Tensor | None], wanted: list[tuple[bool, Any]]) -> list[torch.Tensor | None]:
        """`wanted`: for each tensor that it was given, whether its gradient is, and the layout of it."""
        found: list[torch.Tensor | None] = [None] * len(wanted)
        failures = self.place.failures
        if self.mine and failures.found is None:
            try:
                found = self._differentiate(grads)
            except Exception as error:  # a hook's, or an autograd function's of the user's
                failures.take(error)
        taken = self._share(found, wanted)
        if not self.place.accumulates:  # no backward of all parameters follows, where ranks would hear of a failure
            failed = torch.tensor([int(failures.found is not None)], device=self.device)
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
            if failed.item():
                failures.agree()
        return taken

    def _share(self, found: list[torch.Tensor | None], wanted: list[tuple[bool, Any]]) -> list[torch.Tensor | None]:
        """The owner's, on every rank."""
        sizes = [layout.bytes for wants, layout in wanted if wants]
        if not sizes:
            return [None] * len(wanted)
        buffer = torch.zeros(len(sizes) + sum(sizes), dtype=torch.uint8, device=self.device)
        there, *parts = buffer.split([len(sizes), *sizes])
        if self.mine:
            pairs = [(g, layout) for g, (wants, layout) in zip(found, wanted, strict=True) if wants]
            there.copy_(torch.tensor([g is not None for g, _ in pairs], dtype=torch.uint8))
            for part, (g, layout) in zip(parts, pairs, strict=True):
                if g is not None:
                    part.copy_(layout.flat(g.to_dense() if g.is_sparse else g).view(torch.uint8))
        self._broadcast(buffer)
        flags = iter(there.tolist())
        bytes_of = iter(parts)
        taken: list[torch.Tensor | None] = []
        for wants, layout in wanted:
            part = next(bytes_of) if wants else None
            taken.append(layout.of_bytes(part) if part is not None and next(flags) else None)
        return taken

    def _differentiate(self, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        assert self.kept is not None
        starts, outputs = self.kept
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        again = autograd_engine.keeps_graph()
        try:
            with self.place.computing(False):
                return self._found([o for o, _ in pairs], [g for _, g in pairs], starts, again)
        finally:
            for start in starts:
                start.grad = None
            if not again:
                self.kept = None

    def _found(self, ends: list[Any], given: list[Any], starts: list[Any], again: bool) -> list[torch.Tensor | None]:
        if not ends:
            return [None] * len(starts)
        if self.place.accumulates:
            torch.autograd.backward(ends, given, retain_graph=again)
            return [start.grad for start in starts]
        wanted = [start for start in starts if start.requires_grad]
        if not wanted:
            return [None] * len(starts)
        found = iter(torch.autograd.grad(ends, wanted, given, retain_graph=again, allow_unused=True))
        return [next(found) if start.requires_grad else None for start in starts]


class PartFunction(torch.autograd.Function):
    """Ties what a call returned to what it was given, on every rank. The anchor has a gradient even where nothing else
    has, so that the part's parameters get theirs."""

    @staticmethod
    def forward(ctx: Any, call: PartCall, graph: bool, anchor: torch.Tensor, *given: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        outputs, differ = call.forward(list(given), graph)
        ctx.mark_non_differentiable(*(out for out, has in zip(outputs, differ, strict=True) if not has))
        if graph:
            ctx.call = call
            ctx.layouts = [(MemoryLayout(t) if t.requires_grad else None) for t in given]
            ctx.save_for_backward(anchor)  # a second backward is torch's to refuse where no graph was retained
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotSupported(AGAIN)
        _ = ctx.saved_tensors
        pairs = zip(ctx.needs_input_grad[3:], ctx.layouts, strict=True)
        wanted = [(needs and layout is not None, layout) for needs, layout in pairs]
        return None, None, None, *ctx.call.backward(list(grads), wanted)


class EditedAlias(torch.autograd.Function):
    """The same numbers, as something that may be edited in place: then at least it can be told."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _of_its_own(out: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """What a part only passes on would be edited in place on its owner alone, where it is edited."""
    return out.clone() if out.untyped_storage().data_ptr() in taken else out


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensors.version(tensor)


def _rebuild(plain: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    module = plain.__new__(plain)
    vars(module).update(attributes)
    return module
