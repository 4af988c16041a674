"""Which parts of a model are sharded as one: a unit is gathered before its forward and let go of after it.

A parameter that two parts share (tied embeddings) has to be in the unit that holds both, so parts that would tear it
apart are no units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from nbtrain.compat import modules as torch_modules
from nbtrain.errors import UsageError

MARK = "_nbtrain_unit"

M = TypeVar("M", bound=nn.Module)


def wrap(module: M) -> M:
    """`self.head = nbtrain.wrap(Head())`: under fsdp this module is a unit of its own. Elsewhere it means nothing."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"nbtrain.wrap takes a module, not {type(module).__name__}")
    setattr(module, MARK, True)
    return module


class Together(nn.Module):
    """Models that share parameters, as one root."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        super().__init__()
        self.roots = nn.ModuleList(roots)

    def forward(self) -> None:
        raise NotImplementedError("nobody calls it")


def find_roots(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost ones, one for those that share parameters. Lists of modules are taken apart: nobody calls them."""
    todo = list({id(m): m for m in modules}.values())
    outer = [m for m in todo if not any(m is not other and _contains(other, m) for other in todo)]
    found: list[nn.Module] = []
    while outer:
        module = outer.pop(0)
        if callable_by_itself(module):
            found.append(module)
        else:
            outer[:0] = module.children()
    found = [m for m in {id(m): m for m in found}.values() if next(m.parameters(), None) is not None]
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for module in found:
        held, members = set(map(id, module.parameters())), [module]
        for other in [group for group in groups if group[0] & held]:
            groups.remove(other)
            held |= other[0]
            members = [*other[1], *members]
        groups.append((held, members))
    return [members[0] if len(members) == 1 else Together(members) for _, members in groups]


def find_units(root: nn.Module, rule: Any = ()) -> list[nn.Module]:
    """The units of one model, inner ones first, the root last.

    `rule`: classes or their names, a number of parameters, a function of a module, or nothing: the repeated blocks
    and the root's other children. What was marked by `wrap` is a unit in any case.
    """
    chosen = {id(m) for m in _chosen(root, rule)} | {id(m) for m in root.modules() if getattr(m, MARK, False)}
    chosen = {id(m) for m in root.modules() if id(m) in chosen and callable_by_itself(m) and _holds(m)}
    chosen.add(id(root))
    _keep_shared_together(root, chosen)
    return [m for m in _inner_first(root) if id(m) in chosen]


def callable_by_itself(module: nn.Module) -> bool:
    """Not a ModuleList, ParameterDict and the like: nobody calls those, so nothing would gather them."""
    return type(module).forward is not nn.Module.forward


def check_rule(rule: Any) -> None:
    """A sentence for what can be no rule."""
    parts = _parts(rule)
    numbers = [part for part in parts if isinstance(part, int)]
    if any(isinstance(part, bool) or not _is_rule(part) for part in parts) or (numbers and len(parts) > 1):
        raise UsageError(
            f"--wrap {rule!r}: it takes classes or their names (--wrap Block,Head), a number of parameters "
            "(--wrap 1000000), or a function of a module that says True"
        )
    if any(number < 1 for number in numbers):
        raise UsageError(f"--wrap {rule!r}: a unit has at least one parameter")


def _parts(rule: Any) -> list[Any]:
    if rule is None:
        return []
    parts = list(rule) if isinstance(rule, tuple | list | set | frozenset) else [rule]
    return [name for part in parts for name in (part.replace(" ", "").split(",") if isinstance(part, str) else [part])]


def _is_rule(part: Any) -> bool:
    return isinstance(part, str | int) or callable(part)


def _chosen(root: nn.Module, rule: Any) -> Iterable[nn.Module]:
    parts = _parts(rule)
    if not parts:
        return _by_default(root)
    if isinstance(parts[0], int):
        return _by_size(root, parts[0])
    tests = [_test(part) for part in parts]
    found = [m for m in root.modules() if any(test(m) for test in tests)]
    names = [part if isinstance(part, str) else part.__name__ for part in parts if isinstance(part, str | type)]
    if not found and names:
        there = sorted({type(m).__name__ for m in root.modules() if _holds(m)})
        raise UsageError(f"--wrap {','.join(names)}: {type(root).__name__} has no such part; it has {', '.join(there)}")
    return found


def _test(part: Any) -> Callable[[nn.Module], bool]:
    if isinstance(part, str):
        return lambda m: any(kind.__name__ == part for kind in type(m).__mro__)
    if isinstance(part, type):
        # The notebook's class may have been defined anew since the model was made.
        return lambda m: isinstance(m, part) or type(m).__qualname__ == part.__qualname__
    return lambda m: bool(part(m))


def _by_default(root: nn.Module) -> Iterator[nn.Module]:
    yield from _blocks(root)
    yield from _children(root)


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
    """The root's own, those of a ModuleList or ModuleDict among them in its place."""
    for child in root.children():
        if callable_by_itself(child):
            yield child
        else:
            yield from _children(child)


def _by_size(root: nn.Module, least: int) -> list[nn.Module]:
    """Inner ones first: whatever has so many parameters that are in no unit yet."""
    found: list[nn.Module] = []
    taken: set[int] = set()
    for module in _inner_first(root):
        free = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(free.values()) >= least and callable_by_itself(module):
            found.append(module)
            taken |= free.keys()
    return found


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _inner_first(root: nn.Module) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}

    def walk(module: nn.Module) -> None:
        if id(module) not in found:
            for child in module.children():
                walk(child)
            found[id(module)] = module

    walk(root)
    return list(found.values())


def _keep_shared_together(root: nn.Module, chosen: set[int]) -> None:
    """Take out of `chosen` what holds a part of the places of one parameter only."""
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


def _contains(module: nn.Module, other: nn.Module) -> bool:
    return any(part is other for part in module.modules())
