"""Finds the units of a model: a unit is gathered before its forward and let go of after it.

A parameter that two parts share (tied embeddings) has to be in the unit that holds both, so parts that would tear it
apart are no units.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from nbtrain.base.errors import UsageError
from nbtrain.compat import lightning
from nbtrain.compat import modules as torch_modules

MARK = "_nbtrain_unit"

M = TypeVar("M", bound=nn.Module)


def wrap(module: M) -> M:
    """Make a module a unit of its own under fsdp: `self.head = nbtrain.wrap(Head())`. No effect elsewhere."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"nbtrain.wrap takes a module, not {type(module).__name__}")
    setattr(module, MARK, True)
    return module


class SharedRoot(nn.Module):
    """One root for models that share parameters."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        super().__init__()
        self.roots = nn.ModuleList(roots)

    def forward(self) -> None:
        raise NotImplementedError("nobody calls it")


def find_roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost modules; those that share parameters are one root."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for module in outermost(modules):
        keys, members = set(map(id, module.parameters())), [module]
        for other in [group for group in groups if group[0] & keys]:
            groups.remove(other)
            keys |= other[0]
            members = [*other[1], *members]
        groups.append((keys, members))
    return [members[0] if len(members) == 1 else SharedRoot(members) for _, members in groups]


def called_by_loops(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """What is called of these from outside."""
    return [called for module in modules for called in lightning.called_in_steps(module)]


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Models with parameters that are in no other model. Lists of modules, which nobody calls, are taken apart."""
    todo = list({id(m): m for m in modules}.values())
    outer = [m for m in todo if not any(part is m for other in todo if other is not m for part in other.modules())]
    modules_there: list[nn.Module] = []
    while outer:
        module = outer.pop(0)
        if callable_by_itself(module):
            modules_there.append(module)
        else:
            outer[:0] = module.children()
    return [m for m in {id(m): m for m in modules_there}.values() if next(m.parameters(), None) is not None]


def find_units(root: nn.Module, rule: Any = ()) -> list[nn.Module]:
    """The units of one model, inner ones first, the root last.

    `rule`: classes or their names, a number of parameters, a function of a module, or nothing: the repeated blocks and
    the root's other children. What was marked by `wrap` is a unit in any case.
    """
    chosen = {id(m) for m in _chosen(root, rule)} | {id(m) for m in root.modules() if getattr(m, MARK, False)}
    chosen = {id(m) for m in root.modules() if id(m) in chosen and callable_by_itself(m) and _holds(m)}
    chosen.add(id(root))
    _keep_shared_together(root, chosen)
    return [m for m in _inner_first(root) if id(m) in chosen]


def callable_by_itself(module: nn.Module) -> bool:
    """Whether it has a forward. A ModuleList or ParameterDict has none: nobody calls it, so nothing would gather it."""
    return type(module).forward is not nn.Module.forward


def check_rule(rule: Any) -> None:
    """Raises for a `--wrap` that is no rule."""
    parts = _parts(rule)
    numbers = [part for part in parts if isinstance(part, int)]
    if any(isinstance(part, bool) or not _is_rule(part) for part in parts) or (numbers and len(parts) > 1):
        raise UsageError(
            f"--wrap {rule!r}: it takes classes or their names (--wrap Block,Head), a number of parameters "
            "(--wrap 1000000), or the notebook's name of a function that is called with a module and says True. In "
            "place of a policy of torch.distributed.fsdp.wrap write its classes, its min_num_params, or its lambda_fn"
        )
    if any(number < 1 for number in numbers):
        raise UsageError(f"--wrap {rule!r}: a unit has at least one parameter")


def _parts(rule: Any) -> list[Any]:
    """The parts of a rule: names one by one."""
    if rule is None:
        return []
    parts: list[Any] = []
    for part in rule if isinstance(rule, tuple | list | set | frozenset) else [rule]:
        if isinstance(part, str):
            parts += filter(None, part.replace(" ", "").split(","))
        elif isinstance(part, float) and part.is_integer():
            parts.append(int(part))
        else:
            parts.append(part)
    return parts


def _is_rule(part: Any) -> bool:
    if isinstance(part, str):
        return part.isidentifier()
    return isinstance(part, int | type) or (callable(part) and _takes_a_module(part))


def _takes_a_module(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C: nobody can know
        return True
    return True


def _chosen(root: nn.Module, rule: Any) -> Iterable[nn.Module]:
    parts = _parts(rule)
    if not parts:
        return (*_blocks(root), *_children(root))
    if isinstance(parts[0], int):
        return _by_size(root, parts[0])
    chosen = [m for part in parts for m in filter(_test(part), root.modules())]
    names = [part if isinstance(part, str) else part.__name__ for part in parts if isinstance(part, str | type)]
    if not chosen and names:
        there = sorted({type(m).__name__ for m in root.modules() if _holds(m)})
        raise UsageError(f"--wrap {','.join(names)}: {type(root).__name__} has no such part; it has {', '.join(there)}")
    return chosen


def _test(part: Any) -> Callable[[nn.Module], bool]:
    if isinstance(part, str):
        return lambda m: any(kind.__name__ == part for kind in type(m).__mro__)
    if isinstance(part, type):
        # The notebook's class may have been defined anew since the model was made.
        return lambda m: isinstance(m, part) or type(m).__qualname__ == part.__qualname__
    return lambda m: bool(part(m))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Children of a ModuleList or Sequential that are of one class and have children themselves; outermost only."""
    for child in module.children():
        repeated: set[int] = set()
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            kinds = Counter(type(inner) for inner in child.children())
            for inner in child.children():
                if kinds[type(inner)] > 1 and next(inner.children(), None) is not None:
                    repeated.add(id(inner))
                    yield inner
        if repeated:
            for inner in child.children():
                if id(inner) not in repeated:
                    yield from _blocks(inner)
        else:
            yield from _blocks(child)


def _children(root: nn.Module) -> Iterator[nn.Module]:
    """The root's children, and those of a ModuleList or ModuleDict in its place."""
    for child in root.children():
        if callable_by_itself(child):
            yield child
        else:
            yield from _children(child)


def _by_size(root: nn.Module, least: int) -> list[nn.Module]:
    """Modules with at least so many parameters that are in no unit yet, inner ones first."""
    units: list[nn.Module] = []
    taken: set[int] = set()
    for module in _inner_first(root):
        free = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(free.values()) >= least and callable_by_itself(module):
            units.append(module)
            taken |= free.keys()
    return units


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _inner_first(root: nn.Module) -> list[nn.Module]:
    modules: dict[int, nn.Module] = {}

    def walk(module: nn.Module) -> None:
        if id(module) not in modules:
            for child in module.children():
                walk(child)
            modules[id(module)] = module

    walk(root)
    return list(modules.values())


def _keep_shared_together(root: nn.Module, chosen: set[int]) -> None:
    """Remove from `chosen` modules that hold only some of the places of a shared parameter."""
    ways: dict[int, list[list[int]]] = {}
    """parameter → for each of its places the modules on the way there, innermost first"""

    def walk(module: nn.Module, above: list[int]) -> None:
        way = [id(module), *above]
        for p in torch_modules.parameters(module).values():
            if p is not None:
                ways.setdefault(id(p), []).append(way)
        for child in torch_modules.children(module).values():
            if child is not None and id(child) not in above:
                walk(child, way)

    walk(root, [])
    torn = [places for places in ways.values() if len(places) > 1]
    again = True
    while again:  # one that goes may leave another parameter's places to two
        again = False
        for places in torn:
            units = [next(m for m in way if m in chosen) for way in places]
            if len(set(units)) > 1:
                everywhere = set.intersection(*(set(way) for way in places))
                chosen -= set(units) - everywhere
                again = True
