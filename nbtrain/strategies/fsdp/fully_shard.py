"""torch's `fully_shard` on one tree of modules, and what it needs to serve loops as people write them.

`fully_shard` gathers a unit's weights when the unit's forward is called, and nowhere else. A part of it that is called
by itself, or a method that uses its weights, finds them in pieces, as the loop does (`piece_functions.py`). Added here:

- a forward or backward that raised leaves nothing behind;
- weights that were gathered for a forward without a backward are let go of before they can go stale;
- lists of weights that recurrent layers keep are what the notebook has (`flat_weights.py`);
- `zero_grad`, `load_state_dict` and `deepcopy` mean what they mean for an ordinary model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NotSupported
from nbtrain.compat import fsdp2, tensors
from nbtrain.compat import modules as torch_modules
from nbtrain.compat.compiler import outside_graphs
from nbtrain.compat.pytree import tree_map_only
from nbtrain.strategies.fsdp import given_memory, refusals
from nbtrain.strategies.fsdp.flat_weights import FlatWeights
from nbtrain.strategies.fsdp.used_parameters import UsedParameters
from nbtrain.strategies.kit import dtensor_operations
from nbtrain.strategies.kit.collective_calls import needs_all_ranks, subject_of
from nbtrain.strategies.kit.library_attachments import LibraryAttachments
from nbtrain.strategies.kit.row_shards import cut


class ShardedTree:
    """One root with its units."""

    def __init__(
        self, name: str, root: nn.Module, units: list[nn.Module], options: Callable[[bool], dict[str, Any]]
    ) -> None:
        """`name`: on all ranks. `units`: inner ones first, the root last. `options`: of `fully_shard`, for the root or
        another."""
        paths = {id(part): path for path, part in root.named_modules()}
        self.subjects = [subject_of(f"{name}.{paths[id(unit)]}".rstrip(".")) for unit in units]
        self.name, self.root = name, root
        self.units = units
        self.attachments = LibraryAttachments(root.modules())
        self.copy: Callable[[nn.Module, dict[int, Any]], nn.Module] | None = None
        """what `copy.deepcopy` of a unit gives"""
        self.ids: set[int] = set()
        """ids of its parameters in pieces"""
        self.parts = set(map(id, root.modules()))
        """ids of its modules; `attachments` keeps them alive"""
        self.flat_weights = FlatWeights(root.modules())
        self.flat_weights.flatten_never()
        for unit in units:
            if isinstance(unit, FSDPModule):
                raise NotSupported(refusals.DERIVED.format(type(unit).__name__))
            fsdp2.make_class(type(unit))
            fully_shard(unit, **options(unit is root))
            fsdp2.average_rightly(unit)
        self.device: str = options(True)["mesh"].device_type

    def name_pieces(self) -> None:
        """While a cell runs: ranks compare which of them they read."""
        for path, p in self.root.named_parameters():
            if isinstance(p, DTensor):
                dtensor_operations.give_name(p, f"{self.name}.{path}")

    def finish(self) -> None:
        """Called once all parameters have memory: then the tree can be trained."""
        fsdp2.set_up(self.root)
        self.states = [fsdp2.state(unit) for unit in self.units]
        self.usage = UsedParameters(self.states, self.subjects, self.device)
        self.pieces = [*self.weights()]
        for weight in self.pieces:
            dtensor_operations.know(weight)
        for state in self.states:
            fsdp2.around_outputs(state, _on_no_view)
        for state, about in zip(self.states, self.subjects, strict=True):
            for group in fsdp2.groups(state):
                fsdp2.around_gathering(group, functools.partial(_gathering, about), _outside_inference)
        for unit, state in zip(self.units, self.states, strict=True):
            unit.__class__ = _class_for(type(unit))
            vars(unit)["_nbtrain_tree"] = self
            unit.register_forward_pre_hook(_before(state), prepend=True)
            unit.register_forward_hook(_after(state, self.usage), always_call=True)
        self.attachments.record()

    def put_on(self) -> None:
        """The opposite of `take_off`."""
        self.attachments.on()
        self.flat_weights.let_go()

    def take_off(self) -> None:
        """Take off what torch and nbtrain put on modules: they look as the notebook knows them."""
        if self.attachments.attached:
            self.attachments.off()
            self.flat_weights.put_back()

    def groups(self) -> Iterator[Any]:
        for state in self.states:
            yield from fsdp2.groups(state)

    def weights(self) -> Iterator[Any]:
        for state in self.states:
            yield from fsdp2.all_weights(state)

    @property
    def busy(self) -> bool:
        """Whether a forward or backward is under way."""
        return not all(map(fsdp2.at_rest, (*self.states, *self.groups())))

    def reshard(self) -> None:
        """Let go of what is gathered, where no forward or backward is under way."""
        for state in self.states:
            fsdp2.reshard(state)

    def check_replaced(self) -> None:
        """Raise if the cell has put another parameter in the place of one: torch would put its own back."""
        if self.attachments.attached:
            _check_replaced(self.pieces)

    def reset(self) -> None:
        """Forget a forward or backward that is not to be ended, with the gradients it had gathered."""
        fsdp2.reset_tree(self.root, self.states)
        self.usage.forget()

    def forget(self) -> None:
        """Take everything off, and have torch forget that these were ever set up."""
        self.take_off()
        self.flat_weights.put_back()
        for unit in self.units:
            fsdp2.forget(unit)
        self.attachments = LibraryAttachments(())
        self.flat_weights = FlatWeights(())


def _gathering(about: int, send: Callable[..., Any]) -> Callable[..., Any]:
    return needs_all_ranks(_outside_inference(send), about)


def _outside_inference(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Gather outside of `torch.inference_mode()`: what is gathered inside could not be trained afterwards."""

    @functools.wraps(gather)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return gather(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return gather(*args, **kwargs)

    return gathering


def _on_no_view(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Copy outputs that are views before the hook is put on them that gathers the unit's weights for its backward.
    After `x = embed(x); x += place` an output that is a view, as a Linear's is, has another graph, without the hook."""

    def registered(output: Any) -> Any:
        return register(
            tree_map_only(torch.Tensor, lambda t: t.clone() if t.requires_grad and tensors.is_view(t) else t, output)
        )

    return registered


def _raised(output: Any) -> bool:
    """A hook that is always called gets None for the output of a forward that raised."""
    return output is None and sys.exc_info()[0] is not None


def _check_replaced(weights: Iterable[Any]) -> None:
    if (gone := fsdp2.replaced(weights)) is not None:
        module, name, cast = gone
        raise NotSupported((refusals.CAST if cast else refusals.REPLACED).format(name, type(module).__name__))


def _before(state: Any) -> Callable[..., Any]:
    """The first of a unit's forward pre-hooks: uses what is still gathered, unless something was written since."""
    own = [*fsdp2.all_weights(state)]

    @outside_graphs
    def before(module: nn.Module, args: Any) -> None:
        if given_memory.given:
            given_memory.check()
        _check_replaced(own)
        written = getattr(state, "nbtrain_writes", None)
        if written is not None and not fsdp2.in_forward(state) and fsdp2.is_gathered(state):
            if written != dtensor_operations.counts[0]:
                fsdp2.reshard(state)
            if fsdp2.is_gathered(state):
                fsdp2.show_gathered(state)

    return before


def _after(state: Any, usage: UsedParameters) -> Callable[..., Any]:
    """The last of a unit's forward hooks. What is gathered stays for the backward. The loop reads and writes the
    parameters in pieces all the same: what is written to gathered ones would be lost."""

    @outside_graphs
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if _raised(output):
            if fsdp2.in_forward(state):
                fsdp2.reset_unit(state)
            return
        usage.unit_ran(state)
        if not torch.is_grad_enabled():  # no backward will do it
            fsdp2.reshard(state)
        if fsdp2.is_gathered(state):
            fsdp2.show_pieces(state)
            state.nbtrain_writes = dtensor_operations.counts[0]

    return after


class _Unit:
    """The first base of a unit's class while a cell runs; torch's own and the user's class follow."""

    _nbtrain_plain: type[nn.Module]
    _nbtrain_tree: ShardedTree

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._nbtrain_plain(*args, **kwargs)  # a part of a Sequential is an ordinary Sequential

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._nbtrain_tree.reshard()  # the gradients are those of the shards
        super().zero_grad(set_to_none)  # type: ignore[misc]  # the next classes are modules

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self._nbtrain_tree.reshard()
        # the next classes are modules
        own = dict(self.named_parameters(remove_duplicate=False))  # type: ignore[attr-defined]
        given = dict(state_dict)
        for name, value in given.items():
            like = own.get(name)
            if isinstance(like, DTensor) and not isinstance(value, DTensor) and value.shape == like.shape:
                given[name] = cut(like, value)
        return super().load_state_dict(given, *args, **kwargs)  # type: ignore[misc]  # the next classes are modules

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make = self._nbtrain_tree.copy
        assert make is not None
        return make(self, memo)  # type: ignore[arg-type]  # the next classes are modules

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupported(
            f"{type(self).__name__} cannot be pickled under fsdp: every rank holds a part of it. Save "
            "model.state_dict(), which comes out whole, or pickle the model in the notebook after the cell"
        )


_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def _class_for(sharded: type) -> type:
    """The class of a unit. `sharded`: the class that torch has given it."""
    cls = _classes.get(sharded)
    if cls is None:
        plain = next(kind for kind in sharded.__mro__ if kind not in (sharded, FSDPModule))
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_nbtrain_plain": plain}
        cls = _classes[sharded] = torch_modules.class_before(_Unit, sharded, plain.__name__, names)
    return cls


def prefetch_further(units: Iterable[nn.Module], ahead: int = 2) -> None:
    """Have so many further units gathered while a unit computes, in both directions."""
    ordered: list[Any] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(ordered):
        unit.set_modules_to_forward_prefetch(ordered[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(ordered[max(0, i - ahead) : i][::-1])
