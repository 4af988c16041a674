"""torch's `fully_shard` on one tree of modules, and what it needs to serve loops as people write them.

By itself `fully_shard` gathers a unit's weights when the unit's forward is called, and nowhere else. Added here:

- a part of a unit may be called by itself (`model.emb(x)`, or from a method of the model's own), and so may a method
  that uses the unit's own parameters: it gathers them, and lets go of them when it returns;
- what such a method writes to the weights it was given (`reset_parameters()`) is kept;
- a forward or backward that raised leaves nothing behind;
- weights that were gathered for a forward without a backward are let go of before they can go stale;
- lists of weights that recurrent layers keep are what the notebook has (`library_attachments.py`);
- `zero_grad`, `load_state_dict` and `deepcopy` mean what they mean for an ordinary model.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from nbtrain.compat import fsdp2, tensors
from nbtrain.compat import modules as torch_modules
from nbtrain.compat.compiler import outside_graphs
from nbtrain.compat.dtensor import local as local_part
from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import NotSupported
from nbtrain.strategies.fsdp import given_memory
from nbtrain.strategies.fsdp.library_attachments import FlatWeights, LibraryAttachments
from nbtrain.strategies.fsdp.mixed_operands import OTHER
from nbtrain.strategies.fsdp.used_parameters import UsedParameters
from nbtrain.strategies.kit import dtensor_operations
from nbtrain.strategies.kit.collective_calls import needs_all_ranks, subject_of
from nbtrain.strategies.kit.random_draws import shared_random_state
from nbtrain.strategies.kit.row_shards import cut, rows
from nbtrain.strategies.kit.sharding_units import callable_by_itself

NOT_THROUGH = frozenset({"forward", "extra_repr"})
"""methods that gather nothing: torch gathers for the first, and the second prints shapes"""


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
        for weight in self.weights():
            dtensor_operations.know(weight)
        nested = set(map(id, self.units))
        for state in self.states:
            fsdp2.around_outputs(state, _on_no_view)
        for state, about in zip(self.states, self.subjects, strict=True):
            around = functools.partial(_gathering, about)
            for group in fsdp2.groups(state):
                fsdp2.around_gathering(group, around, _outside_inference)
        for unit, state in zip(self.units, self.states, strict=True):
            unit.__class__ = _class_for(type(unit))
            vars(unit)["_nbtrain_tree"] = self
            unit.register_forward_pre_hook(_before(state), prepend=True)
            unit.register_forward_hook(_after(state, self.usage), always_call=True)
            for part in _parts(unit, nested):
                enter, leave = _door(state, self.usage)
                part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                part.register_forward_hook(leave, always_call=True)
            for name, method in _methods_with_parameters(unit, nested):
                vars(unit)[name] = _through(unit, state, method, self.usage)
        self.attachments.record()

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


def _between_forwards(state: Any) -> None:
    """A forward has ended, and what it gathered stays for the backward. The loop reads and writes the parameters in
    pieces all the same: what is written to gathered ones would be lost."""
    if fsdp2.is_gathered(state):
        fsdp2.show_pieces(state)
        state.nbtrain_writes = dtensor_operations.counts[0]


def _into_forward(state: Any) -> None:
    """A forward begins: use what is still gathered, unless something has been written since."""
    if given_memory.given:
        given_memory.check()
    written = getattr(state, "nbtrain_writes", None)
    if written is not None and not fsdp2.in_forward(state) and fsdp2.is_gathered(state):
        if written != dtensor_operations.counts[0]:
            fsdp2.reshard(state)
        if fsdp2.is_gathered(state):
            fsdp2.show_gathered(state)


def _before(state: Any) -> Callable[..., Any]:
    """The first of a unit's forward pre-hooks."""

    @outside_graphs
    def before(module: nn.Module, args: Any) -> None:
        _into_forward(state)

    return before


def _end_forward(state: Any, usage: UsedParameters) -> None:
    usage.unit_ran(state)
    if not torch.is_grad_enabled():  # no backward will do it
        fsdp2.reshard(state)
    _between_forwards(state)


def _after(state: Any, usage: UsedParameters) -> Callable[..., Any]:
    """The last of a unit's forward hooks."""

    @outside_graphs
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if _raised(output):
            if fsdp2.in_forward(state):
                fsdp2.reset_unit(state)
            return
        _end_forward(state, usage)

    return after


def _door(state: Any, usage: UsedParameters) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks for a part of a unit. If the part is called by itself, its forward counts as the unit's."""
    opened: list[bool] = []

    @outside_graphs
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        outermost = not fsdp2.in_forward(state)
        opened.append(outermost)
        if outermost:
            _into_forward(state)
        return fsdp2.begin_forward(state, module, args, kwargs) if outermost else None

    @outside_graphs
    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if not (opened and opened.pop()):
            return None
        if _raised(output):
            if fsdp2.in_forward(state):  # not by a checkpoint that has recomputed enough
                fsdp2.reset_unit(state)
            return None
        output = fsdp2.end_forward(state, module, args, output)
        _end_forward(state, usage)
        return output

    return enter, leave


def _through(unit: nn.Module, state: Any, method: Callable[..., Any], usage: UsedParameters) -> Callable[..., Any]:
    """Wrap a method that uses its unit's own parameters. If it is called by itself, it counts as the unit's forward."""
    watched: set[int] = set()
    writes = any(name == "data" or name[-1:] == "_" != name[-2:-1] for name in _names_in(method.__code__))

    @functools.wraps(method)
    def through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if fsdp2.in_forward(state):
            return method(self, *args, **kwargs)
        _into_forward(state)
        args, kwargs = fsdp2.begin_forward(state, self, args, kwargs)
        weights = list(fsdp2.all_weights(state))
        for whole in map(fsdp2.gathered, weights):
            if whole.requires_grad and id(whole) not in watched:
                # The method may run a backward itself, which has to end as one does that begins at an output.
                watched.add(id(whole))
                whole.register_post_accumulate_grad_hook(lambda _: fsdp2.end_backward_of(state))
        stood_on = next(self.parameters()).device
        stood = [_versions(weight) for weight in weights]
        drawn = writes and not args and not kwargs  # `reset_parameters()`, not a forward with dropout
        try:
            with shared_random_state(stood_on) if drawn else nullcontext():
                output = method(self, *args, **kwargs)
            for weight in weights if writes else ():
                _where_gathered(weight)
        except BaseException:
            fsdp2.reset_unit(state)
            raise
        _keep_written(weights, stood, writes)
        output = fsdp2.end_forward(state, self, args, output)
        _end_forward(state, usage)
        return output

    return types.MethodType(through, unit)


def _versions(weight: Any) -> tuple[int, int]:
    """The versions of the part and of what is gathered, which grow with each write."""
    return tensors.version(local_part(fsdp2.sharded(weight))), tensors.version(fsdp2.gathered(weight))


def _where_gathered(weight: Any) -> None:
    """After `self.weight.data = other` in a method: move the weight to where the next forward gathers it."""
    part, whole = fsdp2.sharded(weight), fsdp2.gathered(weight)
    if whole.shape != part.shape:
        raise NotSupported(OTHER.format(tuple(whole.shape), whole.dtype, tuple(part.shape), part.dtype))
    fsdp2.lay_where_gathered(weight)


@torch.no_grad()
def _keep_written(weights: list[Any], stood: list[tuple[int, int]], writes: bool) -> None:
    """Write what a method has written to gathered weights to the parts, as rank 0 has it, which drew what one process
    draws. A part that was written to itself, by an optimizer, is newer, and stays.

    `writes`: the method may write to `.data`, which no version shows. Collective then, and where versions differ."""
    asked: list[tuple[torch.Tensor, torch.Tensor, slice]] = []
    for weight, (part_stood, whole_stood) in zip(weights, stood, strict=True):
        part, whole, version = fsdp2.sharded(weight), fsdp2.gathered(weight), _versions(weight)
        if version[0] != part_stood or not (writes or version[1] != whole_stood):
            continue
        if whole.untyped_storage().nbytes():  # not let go of meanwhile
            asked.append((local_part(part), whole, slice(*rows(part))))
    if not asked:
        return
    changed = [float(not torch.equal(whole[here], mine.to(whole))) for mine, whole, here in asked]
    told = torch.tensor(changed, device=asked[0][1].device)
    dist.all_reduce(told)
    for (mine, whole, here), anywhere in zip(asked, told.tolist(), strict=True):
        if anywhere:
            new = whole.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(new, src=0)
            whole.data.copy_(new)
            mine.copy_(new[here])
            dtensor_operations.counts[0] += 1


def _parts(unit: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """The children of a unit that have parameters and are no units; for a ModuleList its members."""
    for child in unit.children():
        if id(child) in units or next(child.parameters(), None) is None:
            continue
        if callable_by_itself(child):
            yield child
        else:
            yield from _parts(child, units)


def _methods_with_parameters(unit: nn.Module, units: set[int]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """No other methods: what gathers has to be called by every rank, and `print(model)` below `if rank == 0` is not."""
    names = set(_own_names(unit))
    seen: set[str] = set()
    for kind in type(unit).__mro__ if names else ():
        if kind in (*nn.Module.__mro__, FSDPModule):
            continue
        for name, value in vars(kind).items():
            if name in seen or name in NOT_THROUGH or name.startswith("__") or not inspect.isfunction(value):
                continue
            seen.add(name)
            if not inspect.isgeneratorfunction(value) and names & _names_in(value.__code__):
                yield name, value


def _own_names(unit: nn.Module) -> Iterator[str]:
    yield from (name for name, p in torch_modules.parameters(unit).items() if p is not None)
    for name, child in torch_modules.children(unit).items():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield name


def _names_in(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _names_in(inner)
    return found


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
    found = _classes.get(sharded)
    if found is None:
        plain = next(kind for kind in sharded.__mro__ if kind not in (sharded, FSDPModule))
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_nbtrain_plain": plain}
        found = _classes[sharded] = torch_modules.class_before(_Unit, sharded, plain.__name__, names)
    return found


def prefetch_further(units: Iterable[nn.Module], ahead: int = 2) -> None:
    """Have so many further units gathered while a unit computes, in both directions."""
    ordered: list[Any] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(ordered):
        unit.set_modules_to_forward_prefetch(ordered[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(ordered[max(0, i - ahead) : i][::-1])
