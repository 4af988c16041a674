"""Moves modules, optimizers, schedulers and data loaders."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from operator import is_
from typing import Any

from nbtrain.compat import loaders, modules, optimizers
from nbtrain.exchange.kinds.base import NOTHING, Handle, Kind, MakeTwin, Node, Receiver, Sender
from nbtrain.exchange.kinds.changed_class import class_entry, take_class
from nbtrain.exchange.kinds.objects import InstanceKind, OpaqueKind, sent_before

SKIPPED = frozenset((*modules.TABLES, modules.COMPILED_CALL))
HOOKS = frozenset((*modules.ALL_HOOKS, modules.NOT_SAVED, *optimizers.ALL_HOOKS))
"""Tables that every module or optimizer has on both sides, most of them empty."""
NO_DICT = "__getstate__"
"""The name of a state that is no dict."""
SCHEDULES_SENT: weakref.WeakSet[Any] = weakref.WeakSet()
"""Schedules that came from the other side: on a rank, those that the notebook has made."""


class ModuleKind(Kind):
    """`nn.Module`: one node a module; its tables of parameters, buffers and children belong to it."""

    name = "module"
    lasting = True

    def put_order(self, obj: Any) -> int:
        return 2 if _own_setstate(obj) else 0

    def make_args(self, node: Node, walk: Sender) -> Any:
        return walk.encode(modules.class_of(node.obj))

    def make(self, args: Any, receiver: Receiver) -> Any:
        import torch

        cls = receiver.decode(args)
        obj = cls.__new__(cls)
        torch.nn.Module.__init__(obj)
        return obj

    def _state(self, obj: Any) -> tuple[dict[str, Any], list[str] | None]:
        """What travels of a module by name, and the names of what its own `__getstate__` gives where that leaves out
        what torch keeps in every module: einops' layers make it anew, and it is both sides' all the same."""
        import torch

        attributes: dict[str, Any] = vars(obj)
        own = getattr(type(obj), "__getstate__", None)
        if modules.is_parametrized_class(type(obj)):  # it refuses, because a plain pickle would not find its class
            return attributes, None
        if own is getattr(torch.nn.Module, "__getstate__", None):
            return attributes, None
        state: Any = obj.__getstate__()
        state = state if isinstance(state, dict) else {NO_DICT: state}
        if state.keys() >= set(modules.TABLES):
            return state, None
        return {**{key: attributes[key] for key in attributes if key in modules.OF_EVERY_MODULE}, **state}, list(state)

    def look(self, node: Node, walk: Sender) -> Any:
        (attributes, given), cls, before = self._state(node.obj), type(node.obj), node.seen
        if before is not None and before.cls is cls and before.same(attributes):
            return None
        node.seen = _ModuleSeen(attributes, cls)
        boxes = [attributes[name] for name in modules.TABLES]
        skip = {key for key, value in attributes.items() if key in SKIPPED or _empty_hook(key, value)}
        own = [(key, walk.encode(value)) for key, value in attributes.items() if key not in skip]
        now = modules.class_of(node.obj)
        own += class_entry(now, now if before is not None and before.cls is cls else None, walk).items()
        return own, [[(key, walk.encode(value)) for key, value in box.items()] for box in boxes], given

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        own, boxes, given = state
        obj = node.obj
        attributes = vars(obj)
        fields = {key: receiver.decode(value) for key, value in own}
        take_class(obj, modules.class_of(obj), fields)
        for key in sent_before(node, receiver, lambda obj: self._state(obj)[0]):
            if key in fields or key in SKIPPED:
                continue
            if key not in HOOKS:
                attributes.pop(key, None)
            elif attributes.get(key):
                attributes[key].clear()
        if _own_setstate(obj):
            inner = [{key: receiver.decode(value) for key, value in box} for box in boxes]
            fresh = dict(zip(modules.TABLES, inner, strict=True))
            if given is None:
                obj.__setstate__({**{k: v for k, v in attributes.items() if _empty_hook(k, v)}, **fields, **fresh})
                node.seen = None
                return
            theirs = {key: fields.pop(key) if key in fields else fresh.get(key, attributes.get(key)) for key in given}
            obj.__setstate__(theirs.get(NO_DICT, theirs))
            attributes = vars(obj)
        attributes.update(fields)
        for name, box in zip(modules.TABLES, boxes, strict=True):
            attributes[name].clear()
            attributes[name].update((key, receiver.decode(value)) for key, value in box)
        node.seen = None

    def settle(self, node: Node) -> None:
        obj = node.obj
        _reserve(obj)
        if "parametrizations" in modules.children(obj) or modules.is_parametrized_class(type(obj)):
            modules.parametrize_again(obj)


def _own_setstate(obj: Any) -> bool:
    import torch

    return type(obj).__setstate__ is not torch.nn.Module.__setstate__


def _empty_hook(key: str, value: Any) -> bool:
    """Whether this is an empty table of hooks, which both sides have and which does not travel."""
    return key in HOOKS and not value  # in this order: not every value is true or false


def _reserve(obj: Any) -> None:
    """Reserve the numbers of hooks that arrived, so that no hook of this side gets one of them."""
    for key, table in vars(obj).items():
        if modules.is_hook_table(key) and isinstance(table, dict) and table:
            modules.reserve_hook_keys(table)


class _ModuleSeen:
    """What a module held. Compared by identity in a few microseconds, because models have hundreds of modules."""

    __slots__ = ("boxes", "cls", "hooked", "hooks", "keys", "lengths", "values")

    def __init__(self, attributes: dict[str, Any], cls: type) -> None:
        self.cls = cls
        self.keys, self.values = list(attributes), list(attributes.values())
        self.boxes = [(name, list(attributes[name]), list(attributes[name].values())) for name in modules.TABLES]
        self.hooks = [value for value in self.values if type(value) in (OrderedDict, set)]
        self.lengths = tuple(map(len, self.hooks))  # one a table: those that were empty are not looked at themselves
        self.hooked = any(self.lengths)

    def same(self, attributes: dict[str, Any]) -> bool:
        if (
            len(attributes) != len(self.values)
            or not all(map(is_, attributes.values(), self.values))
            or list(attributes) != self.keys
        ):
            return False
        for name, keys, values in self.boxes:
            box = attributes[name]
            if len(box) != len(values):
                return False
            if values and not (all(map(is_, box.values(), values)) and list(box) == keys):
                return False
        return tuple(map(len, self.hooks)) == self.lengths if self.hooked else not any(self.hooks)


class OptimizerKind(InstanceKind):
    """An optimizer, with its whole `__dict__`: torch's own pickle drops what a class added (LBFGS its parameters)."""

    name = "optimizer"
    lasting = True

    def fields(self, obj: Any) -> tuple[list[str], list[Any]]:
        attributes = {k: v for k, v in vars(obj).items() if k != "step" and not _empty_hook(k, v)}
        return list(attributes), list(attributes.values())

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        attributes = vars(node.obj)
        tables = {key: value for key, value in attributes.items() if key in HOOKS}
        super().put(node, state, receiver)
        for key, table in tables.items():
            if key not in state[0]:  # the handles of those who come to hang there know this table
                table.clear()
                attributes[key] = table

    def make(self, args: Any, receiver: Receiver) -> Any:
        cls = receiver.decode(args)
        obj = cls.__new__(cls)
        optimizers.make_hook_tables(obj)
        return obj

    def settle(self, node: Node) -> None:
        optimizers.prepare_step(node.obj)
        _reserve(node.obj)


class HookHandleKind(InstanceKind):
    """What `register_…_hook` returns. It refers weakly to the table in which its hook hangs, which has to be the twin
    of that table: a copy would be nobody's."""

    name = "hook handle"
    lasting = True

    def fields(self, obj: Any) -> tuple[list[str], list[Any]]:
        extra = [ref() for ref in obj.extra_dict_ref]
        return ["id", "table", *map(str, range(len(extra)))], [obj.id, obj.hooks_dict_ref(), *extra]

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        attributes = dict(zip(state[0], map(receiver.decode, state[1]), strict=True))
        take_class(node.obj, type(node.obj), attributes)
        node.obj.id, table, *extra = attributes.values()
        node.obj.hooks_dict_ref = _weakly(table)
        node.obj.extra_dict_ref = tuple(map(_weakly, extra))
        node.seen = None


def _weakly(table: Any) -> Any:
    return weakref.ref(OrderedDict() if table is None else table)


class SchedulerKind(InstanceKind):
    """A learning-rate scheduler. The mark it left on its optimizer's `step` is put back, or it would warn falsely."""

    name = "scheduler"
    lasting = True

    def make(self, args: Any, receiver: Receiver) -> Any:
        made = super().make(args, receiver)
        SCHEDULES_SENT.add(made)
        return made

    def settle(self, node: Node) -> None:
        optimizer = getattr(node.obj, "optimizer", None)
        if optimizer is not None and type(optimizer) is not Handle:  # which stays with its optimizer on the ranks
            optimizers.watch_for_schedule(optimizer, node.obj)


class LoaderKind(InstanceKind):
    """A DataLoader. Its running iterator, with its worker processes, stays."""

    name = "loader"
    lasting = True

    def fields(self, obj: Any) -> tuple[list[str], list[Any]]:
        attributes = {k: v for k, v in vars(obj).items() if k != loaders.RUNNING}
        attributes.setdefault(loaders.RUNNING, None)
        return list(attributes), [None if k == loaders.RUNNING else v for k, v in attributes.items()]

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        running = vars(node.obj).get(loaders.RUNNING)
        super().put(node, state, receiver)
        vars(node.obj)[loaders.RUNNING] = running


class CompiledModuleKind(OpaqueKind):
    """`torch.compile(model)`: a shell around the model. What was compiled stays where it was."""

    name = "compiled"
    lasting = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        made = super().make_args(node, walk)
        node.seen = self._seen(node)
        return made

    def made(self, node: Node, args: Any, receiver: Receiver) -> None:
        node.seen = self._seen(node)

    def _seen(self, node: Node) -> tuple[int, int]:
        return id(modules.compiled(node.obj)), id(modules.compiled_by(node.obj))

    def look(self, node: Node, walk: Sender) -> Any:
        if self._seen(node) == node.seen:
            return None
        made = self.make_args(node, walk)
        return NOTHING if walk.quiet else MakeTwin(node.key, self.name, made, anew=True)


MODULE: Kind = ModuleKind()
OPTIMIZER: Kind = OptimizerKind()
SCHEDULER: Kind = SchedulerKind()
HOOK_HANDLE: Kind = HookHandleKind()
LOADER: Kind = LoaderKind()
COMPILED: Kind = CompiledModuleKind()


def kind_of(obj: Any) -> Kind | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return None
    if isinstance(obj, torch.nn.Module):
        if modules.is_compiled_class(type(obj)):
            return COMPILED
        return None if "__reduce__" in _overridden(type(obj), torch.nn.Module) else MODULE
    if isinstance(obj, torch.optim.Optimizer):
        return OPTIMIZER
    if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
        return SCHEDULER
    if isinstance(obj, torch.utils.data.DataLoader):
        return LOADER
    if type(obj) is torch.utils.hooks.RemovableHandle:
        return HOOK_HANDLE
    return None


def _overridden(cls: type, base: type) -> set[str]:
    """Which pickle methods classes below `base` define themselves."""
    mro = cls.__mro__[: cls.__mro__.index(base)]
    return {"__reduce__" for c in mro if {"__reduce__", "__reduce_ex__"} & set(vars(c))}
