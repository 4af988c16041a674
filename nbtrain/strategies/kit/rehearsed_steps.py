"""Whether an optimizer that nobody knows does the same to its parameters if they are cut or replaced: small tensors are
stepped as they are, and so, and compared. Weights, groups, state and the optimizer's own attributes have to agree.

A step that reduces a tensor (a norm, a mean, a row of it) does not treat each element by itself, whatever comes of it
in a few steps; one that asks whether any of them is odd may. What a rule does only every thousand steps is not seen.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from nbtrain.compat import optimizers
from nbtrain.compat.fake_tensors import DispatchMode, without_modes
from nbtrain.strategies.base import STANDS_IN
from nbtrain.strategies.kit.call_arguments import all_tensors

STEPS = 6
"""closures may be called many times in each: then it is two"""
LONGEST = 5
"""of a small tensor's dimensions; odd, so that halves differ"""
GROUPS = 4
"""how many of an optimizer's are tried"""
SCALES = (1.0, 1e-3, 30.0, 0.1, 1e-2, 3.0)
"""of gradients: a rule may clip them"""

Tensors = list[torch.Tensor]
_alike_in: WeakKeyDictionary[Optimizer, set[type[Way]]] = WeakKeyDictionary()
"""in which ways they were alike"""


class Way:
    """How parameters are handed to an optimizer: here all of them, and while it steps others in their places."""

    cuts = False
    each = True
    """whether an optimizer has a state for each of the parameters"""

    def hand_out(self, groups: list[Tensors]) -> list[list[Tensors]]:
        """For each rank: the tensors of each group."""
        return [[[one.clone() for one in group] for group in groups]]

    def give(self, optimizer: Optimizer, before: list[Tensors], own: list[Tensors]) -> None:
        """Have it hold one rank's tensors."""
        pairs = zip((p for group in before for p in group), (p for group in own for p in group), strict=True)
        exchange(optimizer, {id(p): other for p, other in pairs})

    def step(self, optimizer: Optimizer, held: list[torch.Tensor], step: Callable[[], None]) -> None:
        """Have one rank's optimizer step its tensors."""
        others = {id(p): torch.nn.Parameter(p.detach().clone()) for p in held}
        for p in held:
            others[id(p)].grad = p.grad
        exchange(optimizer, others)
        step()
        exchange(optimizer, {id(others[id(p)]): p for p in held})
        for p in held:
            p.data, p.grad = others[id(p)].data, others[id(p)].grad

    def put_together(self, parts: Sequence[Tensors], like: Tensors) -> Tensors:
        """What each rank has of a group, or of its state, in the form of the whole tensors."""
        return parts[0]


class Rows(Way):
    """Each rank has some rows of every tensor."""

    cuts = True

    def hand_out(self, groups: list[Tensors]) -> list[list[Tensors]]:
        def part(one: torch.Tensor, rank: int) -> torch.Tensor:
            return (one.tensor_split(2)[rank] if one.dim() else one).clone()

        return [[[part(one, rank) for one in group] for group in groups] for rank in range(2)]

    def put_together(self, parts: Sequence[Tensors], like: Tensors) -> Tensors:
        return [torch.cat(rows) if one.dim() else rows[0] for one, *rows in zip(like, *parts, strict=True)]


class Flat(Way):
    """All of a group in one vector, of which each rank has a half; stepped one group after the other."""

    cuts = True
    each = False

    def hand_out(self, groups: list[Tensors]) -> list[list[Tensors]]:
        vectors = [torch.cat([one.reshape(-1) for one in group]) for group in groups]
        return [[[vector.tensor_split(2)[rank].clone()] for vector in vectors] for rank in range(2)]

    def give(self, optimizer: Optimizer, before: list[Tensors], own: list[Tensors]) -> None:
        pairs = zip(optimizer.param_groups, own, strict=True)
        optimizer.param_groups = [{**group, "params": parameters} for group, parameters in pairs]
        optimizer.state = defaultdict(dict)

    def step(self, optimizer: Optimizer, held: list[torch.Tensor], step: Callable[[], None]) -> None:
        every = optimizer.param_groups
        for group in every:
            optimizer.param_groups = [group]
            step()
        optimizer.param_groups = every

    def put_together(self, parts: Sequence[Tensors], like: Tensors) -> Tensors:
        pieces = torch.cat([one for part in parts for one in part]).split([one.numel() for one in like])
        return [piece.view(one.shape) for piece, one in zip(pieces, like, strict=True)]


def all_of(optimizer: Optimizer) -> list[Optimizer]:
    """It, and the optimizers that it keeps and steps."""
    found = [optimizer]
    for one in found:
        inner = [value for value in vars(one).values() if isinstance(value, Optimizer)]
        found += [value for value in inner if not any(value is known for known in found)]
    return found


def exchange(optimizer: Optimizer, new: Mapping[int, torch.Tensor]) -> None:
    """Have it hold other parameters, by the ids of those that it holds, in place: lists and states stay what they
    are."""
    for one in all_of(optimizer):
        for group in one.param_groups:
            group["params"][:] = [new.get(id(p), p) for p in group["params"]]
        state = list(one.state.items())
        if any(id(key) in new for key, _ in state):
            one.state.clear()
            one.state.update((new.get(id(key), key), value) for key, value in state)


def steps_alike(optimizer: Optimizer, way: Way, closure: bool = False) -> bool:
    """Whether steps of its class, with its options, come to the same in this way. `closure`: they are given one if they
    cannot do without. What was found stays true: what a step leaves in its attributes may not fit small tensors."""
    known = _alike_in.setdefault(optimizer, set())
    if type(way) not in known and _try(optimizer, way, closure):
        known.add(type(way))
    return type(way) in known


def _try(optimizer: Optimizer, way: Way, closure: bool) -> bool:
    with (
        torch.random.fork_rng(_cards(optimizer)),
        torch.enable_grad(),
        optimizers.without_global_hooks(),
        redirect_stdout(StringIO()),
    ):
        for given in (False, True) if closure else (False,):
            try:
                return _compare(optimizer, way, given)
            except Exception:  # somebody else's code, on tensors that it may not have been made for
                continue
    return False


def _cards(optimizer: Optimizer) -> list[torch.device]:
    """The GPUs on which it steps, and may draw."""
    every = (p.device for one in all_of(optimizer) for group in one.param_groups for p in group["params"])
    return list(dict.fromkeys(device for device in every if device.type == "cuda"))


def _compare(optimizer: Optimizer, way: Way, closure: bool) -> bool:
    whole, small = _twin(optimizer, way.cuts)
    before = [p.detach().clone() for group in small for p in group]
    gradients = list(_gradients(small))[: 2 if closure else STEPS]
    parts, shares = way.hand_out(small), [way.hand_out(one) for one in gradients]
    ranks = []
    for rank, tensors in enumerate(parts):
        twin, own = _twin(optimizer, way.cuts)
        held: list[Tensors] = [[_small(one.detach()) for one in group] for group in tensors]
        way.give(twin, own, held)
        _play(twin, held, [one[rank] for one in shares], way, closure)
        ranks.append((twin, held))
    with Reductions() as found:
        _play(whole, small, gradients, None, closure)
    if way.cuts:
        pairs = zip((p for group in small for p in group), before, strict=True)
        if found.any or all(torch.equal(p, old) for p, old in pairs):
            return False
    return _alike(whole, small, ranks, way)


def _twin(optimizer: Optimizer, some: bool) -> tuple[Optimizer, list[Tensors]]:
    """An optimizer of this class and options that holds small tensors, or `some` of them; and these, of each of its
    groups."""
    generator = torch.Generator().manual_seed(5)
    memo: dict[int, Any] = {}
    every = all_of(optimizer)
    for p in (p for one in every for group in one.param_groups for p in group["params"]):
        shape = [min(size, LONGEST) for size in p.shape]
        dtype = torch.complex64 if p.is_complex() else torch.float32
        drawn = torch.randn(shape, dtype=dtype, generator=generator).to("cpu" if p.is_meta else p.device)
        memo.setdefault(id(p), _small(drawn))
    for one in every:
        beside = {name: value for name, value in vars(one).items() if name not in ("param_groups", "state")}
        for tensor in all_tensors(beside):  # in a list, perhaps, in the order of the parameters
            shape = [min(size, LONGEST) for size in tensor.shape]
            memo.setdefault(id(tensor), torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
        memo[id(one)] = type(one).__new__(type(one))
        memo[id(one.state)] = defaultdict(dict)
    for one in every:
        vars(memo[id(one)]).update(copy.deepcopy(optimizers.without_hooks(vars(one)), memo))
        optimizers.make_hook_tables(memo[id(one)])
    twin: Optimizer = memo[id(optimizer)]
    if some:
        del twin.param_groups[GROUPS:]
    for group in twin.param_groups:
        if some:
            group["params"][:] = _examples(group["params"])
        if "lr" in group:  # a schedule may have set it to zero
            group["lr"] = torch.full_like(group["lr"], 0.01) if isinstance(group["lr"], torch.Tensor) else 0.01
    return twin, [list(group["params"]) for group in twin.param_groups]


def _small(content: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(content)
    vars(made)[STANDS_IN] = True
    return made


def _examples(parameters: Tensors) -> Tensors:
    """Two of each number of dimensions."""
    kinds: dict[int, Tensors] = defaultdict(list)
    for p in parameters:
        if len(kinds[p.dim()]) < 2:
            kinds[p.dim()].append(p)
    return [p for kind in kinds.values() for p in kind]


def _gradients(groups: list[Tensors]) -> Iterator[list[Tensors]]:
    generator = torch.Generator().manual_seed(7)
    for scale in SCALES:
        yield [
            [scale * torch.randn(p.shape, dtype=p.dtype, generator=generator).to(p.device) for p in group]
            for group in groups
        ]


def _play(optimizer: Optimizer, groups: list[Tensors], gradients: list[Any], way: Way | None, closure: bool) -> None:
    torch.default_generator.manual_seed(3)  # `torch.manual_seed` would seed every GPU
    for card in _cards(optimizer):
        with torch.cuda.device(card):
            torch.cuda.manual_seed(3)
    held = [p for group in groups for p in group]
    for now in gradients:
        own = [gradient for group in now for gradient in group]

        def loss(own: Tensors = own) -> torch.Tensor:
            """Of each element by itself."""
            every = [p for group in optimizer.param_groups for p in group["params"]]
            for p in every:
                p.grad = None
            with torch.enable_grad(), without_modes():
                pairs = zip(every, own, strict=True)
                found: Any = sum(((p - gradient).abs() ** 2).sum() for p, gradient in pairs)
                found.backward()
            detached: torch.Tensor = found.detach()
            return detached

        def step(arguments: Any = (loss,) if closure else ()) -> None:
            unhooked(type(optimizer))(optimizer, *arguments)

        for p, gradient in zip(held, own, strict=True):
            p.grad = gradient.clone()
        if way is None:
            step()
        else:
            way.step(optimizer, held, step)


class Reductions(DispatchMode):
    """Notes whether an operation makes fewer numbers of a tensor than it has."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        many = args and isinstance(args[0], list | tuple) and isinstance(found, list | tuple)
        pairs = zip(args[0], found, strict=False) if many else itertools.product(args, _listed(found))
        self.any = self.any or any(itertools.starmap(_reduces, pairs))
        return found


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _reduces(read: Any, made: Any) -> bool:
    """A question (`isnan().any()`) is none."""
    if not isinstance(read, torch.Tensor) or not isinstance(made, torch.Tensor) or read.dtype == torch.bool:
        return False
    return made.numel() < read.numel()


def unhooked(cls: type[Optimizer]) -> Callable[..., Any]:
    """`step` below the wrapper by which torch calls everybody's hooks: these steps are nobody's business."""
    step: Callable[..., Any] = cls.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


# --- comparing ------------------------------------------------------------------------------------


def _alike(whole: Optimizer, small: list[Tensors], ranks: list[Any], way: Way) -> bool:
    for number, group in enumerate(whole.param_groups):
        held = [parts[number] for _, parts in ranks]
        if not _same_tensors(way.put_together(held, small[number]), small[number]):
            return False
        states = [[twin.state.get(p, {}) for p in parts[number]] for twin, parts in ranks]
        if not _same_state([whole.state.get(p, {}) for p in small[number]], states, small[number], held, way):
            return False
        if not all(_same_options(group, twin.param_groups[number]) for twin, _ in ranks):
            return False
    own = optimizers.without_hooks(vars(whole))
    return all(_same_options(own, vars(twin)) for twin, _ in ranks)


def _same_tensors(some: Tensors, others: Tensors) -> bool:
    return all(
        one.shape == other.shape
        and bool(torch.isfinite(one).all())
        and torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-9)
        for one, other in zip(some, others, strict=True)
    )


def _same_state(whole: list[Any], ranks: list[list[Any]], small: Tensors, held: list[Tensors], way: Way) -> bool:
    """What a state has for each element is cut as the parameters are; what it has once is the same everywhere."""
    if way.each and len(whole) > 1:
        return all(
            _same_state([whole[i]], [[rank[i]] for rank in ranks], [small[i]], [[part[i]] for part in held], way)
            for i in range(len(whole))
        )
    states = [*whole, *(state for rank in ranks for state in rank)]
    if any(state.keys() != whole[0].keys() for state in states):
        return False
    if len(ranks) == 1 and way.each:
        return _same(whole[0], ranks[0][0])
    for key in whole[0]:
        if any(p.dim() for p in small) and all(_each(state[key], p) for state, p in zip(whole, small, strict=True)):
            parts = [[state[key] for state in rank] for rank in ranks]
            pairs = [
                (value, p) for part, own in zip(parts, held, strict=True) for value, p in zip(part, own, strict=True)
            ]
            if not all(_each(value, p) for value, p in pairs):
                return False
            if not _same_tensors(way.put_together(parts, small), [state[key] for state in whole]):
                return False
        elif not all(_once(state[key]) and _same(state[key], whole[0][key]) for state in states):
            return False
    return True


def _each(value: Any, p: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == p.shape


def _once(value: Any) -> bool:
    """Whether it is one number, or a word."""
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return value is None or isinstance(value, bool | int | float | str)


def _same_options(some: dict[str, Any], others: dict[str, Any]) -> bool:
    compared = some.keys() - {"params", "param_groups", "state"}
    return all(_same(some[name], others.get(name)) for name in compared)


def _same(one: Any, other: Any) -> bool:
    """Of numbers, tensors and what holds them; other objects are not looked into."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.detach(), other.detach(), rtol=1e-5, equal_nan=True)
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6) or one == other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return len(one) == len(other) and all(map(_same, one.values(), other.values()))
    return type(one) is type(other)
