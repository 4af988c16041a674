"""`nn.Module`: its tables, which hold None and order where the public iterators do not, and what torch puts on modules.

Nothing here imports torch. All of it is there in torch 2.8 to 2.15.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from nbtrain.base.errors import text_of
from nbtrain.compat.internals import Internals

its = Internals("torch")

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
TABLES = (PARAMETERS, BUFFERS, CHILDREN)
"""Attributes of every module: what it owns, by name."""
NOT_SAVED = "_non_persistent_buffers_set"
"""The names of buffers that `state_dict` leaves out."""
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ALL_HOOKS = (
    *CALL_HOOKS, "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""The tables behind `register_…_hook`, each an attribute of every module."""
OF_EVERY_MODULE = frozenset((*TABLES, NOT_SAVED, *ALL_HOOKS, "training", "_is_full_backward_hook"))
"""Attributes that `nn.Module.__init__` makes."""
ASSIGNS = "assign_to_params_buffers"
"""What hooks on `load_state_dict` are told of `assign=True`, by this key."""
COMPILED_CALL = "_compiled_call_impl"
"""What `model.compile()` made; it stays in its process."""
CALL = "_call_impl"
"""Called by `__call__`: the hooks, and the forward between them."""
EXTRA_STATE = "_extra_state"
"""The end of the names of a state dict's entries that `get_extra_state` made."""
INITIALIZER = "_init_weights"
"""Hugging Face's models fill each of their modules by this method."""
NORM_LAYER = "torch.nn.modules.batchnorm._NormBase"
"""The class with running statistics below BatchNorm, SyncBatchNorm and InstanceNorm of all dimensions."""
RESETS = ("reset_parameters", "_reset_parameters", "init_weights")
"""Methods that initialise a module's parameters: there is no one name. torch's attention and transformers have the
second."""
FLAT_WEIGHTS, FLAT_WEIGHT_REFERENCES = "_flat_weights", "_flat_weight_refs"
"""Further lists that a recurrent layer keeps: of its weights, and of weak references to them."""

its.fields("torch.nn.Module", *TABLES, NOT_SAVED, *ALL_HOOKS)
its.members("torch.nn.Module", CALL)
its.members("torch.nn.modules.module", *(f"_global{name}" for name in CALL_HOOKS))
its.members("torch.nn.Module", COMPILED_CALL, "_named_members")
its.members("torch.nn.utils.parametrize", "_inject_new_class", "_inject_property")
its.fields("torch.nn.RNNBase", "_flat_weights_names")
its.members("torch.nn.MultiheadAttention", "_reset_parameters")
its.members("torch.nn.Transformer", "_reset_parameters")
its.fields("torch.utils.hooks.RemovableHandle", "id")
its.members("torch.utils.hooks.RemovableHandle", "next_id")


def said_while_loading(error: BaseException) -> str:
    """What an error said that `load_state_dict` has caught, and put into one of its own with others; else nothing."""
    caught = re.search(r"an exception occurred : (\(.*\))\.$", text_of(error), re.MULTILINE)
    return str(literal_eval(caught[1])[0]) if isinstance(error, RuntimeError) and caught else ""


def hooks_made() -> int:
    """How many hooks this process has registered so far."""
    from torch.utils.hooks import RemovableHandle

    return int(RemovableHandle.next_id)


def parameters(module: Any) -> dict[str, Any]:
    """A module's own table of parameters, with those that are None; writing to it changes the module."""
    table: dict[str, Any] = module._parameters
    return table


def buffers(module: Any) -> dict[str, Any]:
    table: dict[str, Any] = module._buffers
    return table


def children(module: Any) -> dict[str, Any]:
    table: dict[str, Any] = module._modules
    return table


def named_parts(module: Any) -> list[tuple[str, Any]]:
    """What `named_modules()` gives, from the tables: torch's generators, nested as deep as the model is, take several
    times as long, and every warm cell asks for it."""
    from torch import nn

    usual = nn.Module.named_modules
    parts: list[tuple[str, Any]] = []
    seen: set[int] = set()
    todo = [("", module)]
    while todo:
        path, part = todo.pop()
        if id(part) in seen:
            continue
        if type(part).named_modules is not usual:
            return list(module.named_modules())
        seen.add(id(part))
        parts.append((path, part))
        if part._modules:
            below = f"{path}." if path else ""
            todo += reversed([(below + name, child) for name, child in part._modules.items() if child is not None])
    return parts


def tensors_of(module: Any) -> tuple[list[Any], list[Any]]:
    """(parameters, buffers) of a module and all in it, each once, in the order of `parameters()` and `buffers()`."""
    from torch import nn

    if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _ITERATORS):
        return list(module.parameters()), list(module.buffers())
    parameters: dict[int, Any] = {}
    buffered: dict[int, Any] = {}
    todo, seen = [module], set[int]()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        if type(part).named_modules is not nn.Module.named_modules:
            return list(module.parameters()), list(module.buffers())
        seen.add(id(part))
        if part._modules:
            todo += [child for child in reversed(part._modules.values()) if child is not None]
        for p in part._parameters.values():
            if p is not None:
                parameters[id(p)] = p
        for b in part._buffers.values():
            if b is not None:
                buffered[id(b)] = b
    return list(parameters.values()), list(buffered.values())


_ITERATORS = (
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "_named_members",
)  # fmt: skip


def call_hooks(module: Any) -> list[Any]:
    """All that are called with a forward or its backward; those for every module of the process, too."""
    from torch.nn.modules import module as every

    tables = (table for name in CALL_HOOKS for table in (getattr(module, name), getattr(every, f"_global{name}")))
    return [hook for table in tables for hook in table.values()]


def is_hook_table(attribute: str) -> bool:
    """Whether it is a table of hooks by its name: torch's, or one that a class of others' has, too."""
    return attribute.endswith(("_hooks", "_buffers_set", "_hooks_with_kwargs", "_hooks_always_called"))


def new_hook_key() -> int:
    """A key that no hook of this process has, as each `register_…_hook` takes one."""
    from torch.utils.hooks import RemovableHandle

    key: int = RemovableHandle(OrderedDict()).id  # it wants a table that can be referred to weakly
    return key


def reserve_hook_keys(keys: Iterable[Any]) -> None:
    """Keep new hooks of this process from getting these keys, which came with hooks of another."""
    from torch.utils.hooks import RemovableHandle

    largest = max((key for key in keys if isinstance(key, int)), default=-1)
    RemovableHandle.next_id = max(RemovableHandle.next_id, largest + 1)


def compiled(module: Any) -> Any:
    """The module inside of what `torch.compile(model)` returned; None for any other."""
    attributes = vars(module)
    return attributes[CHILDREN].get("_orig_mod") if "dynamo_ctx" in attributes else None


def compiled_parts(module: Any) -> list[Any]:
    """Those modules in it that `torch.compile` returned. Most parts are told by their table, without a call."""
    return [part for _, part in named_parts(module) if "dynamo_ctx" in vars(part) and compiled(part) is not None]


def compiled_by(module: Any) -> Any:
    """The context in which what `torch.compile(model)` returned runs the module."""
    return module.dynamo_ctx


def uncompiled_path(path: str) -> str:
    """The path of a parameter or buffer without `torch.compile` around the model or a part of it."""
    return path.replace("_orig_mod.", "")


def parameter_names(module: Any) -> list[str]:
    """What its parts call their parameters: `prune.remove` gives one another name."""
    # The table of a script is no dict, and a generator would count as a call for each part.
    return [name for _, part in named_parts(module) for name, _ in part._parameters.items()]


def is_compiled_class(cls: type) -> bool:
    """The class of what `torch.compile(model)` returns, told without importing the compiler."""
    return cls.__module__ == "torch._dynamo.eval_frame"


def recompile_call(module: Any) -> None:
    """Have a copy of what `torch.compile(model)` returned call its own inner module."""
    vars(module)["forward"] = module.dynamo_ctx(module._modules["_orig_mod"].__call__)


def is_parametrized_class(cls: type) -> bool:
    """The class that torch makes for a module with parametrizations (`weight_norm` and the like): it refuses to be
    pickled, by a method of its own."""
    return getattr(getattr(cls, "__getstate__", None), "__module__", "") == "torch.nn.utils.parametrize"


def class_of(module: Any) -> type:
    """The class of a module as its author knows it: without the one that torch makes for parametrizations."""
    cls = type(module)
    return cls.__bases__[0] if is_parametrized_class(cls) else cls


def parametrize_again(module: Any) -> None:
    """Give a module the class that `torch.nn.utils.parametrize` makes for the parametrizations that it holds; its own
    class where it holds none any more. A copy may share the class that it has, so that one is not changed."""
    from torch.nn.utils import parametrize

    names = set(module.parametrizations) if parametrize.is_parametrized(module) else set()
    own, now = class_of(module), type(module)
    if names == (
        {name for name, attribute in vars(now).items() if isinstance(attribute, property)} if now is not own else set()
    ):
        return
    module.__class__ = own
    if names:
        inject: Any = parametrize
        inject._inject_new_class(module)
        for name in module.parametrizations:
            inject._inject_property(module, name)


def class_before(first: type, cls: type, name: str, body: dict[str, Any]) -> type:
    """A class for objects of `cls`, whose methods are looked for in `first` before. Python gives an object such a class
    only if both lay out their memory alike, which it tells by their first bases: where those of `cls` begin with one
    without attributes (ABC, Generic), `cls` is the first base, and only the order of looking is the other one."""
    root = cls
    while root.__base__ not in (object, None):
        root = root.__base__
    if root.__dictoffset__:
        return type(name, (first, cls), body)
    order = {"mro": lambda made: (made, first, *(kind for kind in cls.__mro__ if kind is not first))}
    kind = type(type(cls).__name__, (type(cls),), order)
    made: type = kind(name, (cls, first), body)
    return made


def flat_weight_names(module: Any) -> list[str]:
    """A recurrent layer's names of weights, in the order of its lists of them."""
    names: list[str] = module._flat_weights_names
    return names
