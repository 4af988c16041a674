"""What a model's forward does, as steps over numbered values; which stage does which; what goes from one to the next.

A step calls one of the model's parts, or does what its forward does between them. Parts are called as they are, so
whatever they do inside (dropout, recomputation, branches) is their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nbtrain.compat import modules, pytree
from nbtrain.strategies.pipeline.cut_stages import StagedModel


@dataclass(frozen=True, slots=True)
class ValueRef:
    """Stands for a value, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Stands for a tensor that the model holds: it is looked up, for the model may have put another in its place."""

    module: nn.Module
    name: str

    def get(self) -> Any:
        parameter = modules.parameters(self.module).get(self.name)
        return modules.buffers(self.module)[self.name] if parameter is None else parameter


@dataclass(slots=True)
class Step:
    call: Callable[..., Any]
    args: Any
    """with `ValueRef` and `HeldTensor` in the places of tensors"""
    kwargs: dict[str, Any]
    whole: int | None = None
    """the number of what it returns, as one value"""
    outs: list[int | None] = field(default_factory=list)
    """otherwise of each of the leaves of what it returns"""
    edits: tuple[int, int] | None = None
    """it changes this value in place, and it is that one from then on"""
    grad: bool = True
    """False: the forward does this under no_grad"""
    part: int | None = None
    """the number of the part that it calls"""
    fixed: bool = False
    """it draws random numbers, or runs a module: one stage does it, once"""
    stage: int | None = None
    """None: whoever needs what it makes does it by itself"""

    def needs(self) -> list[int]:
        return [leaf.number for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, ValueRef)]

    def makes(self) -> list[int]:
        made = [number for number in self.outs if number is not None]
        if self.whole is not None:
            made.append(self.whole)
        if self.edits is not None:
            made.append(self.edits[1])
        return made


class OutOfOrder(Exception):
    """A part is given what a later stage makes. `order`: of the parts, as they are called."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = list(dict.fromkeys(order))


class Program:
    """For one model, cut into stages; the inputs are the values from 0 on."""

    def __init__(
        self, steps: list[Step], inputs: int, output: Any, stages: int, stage_of: Callable[[int], int]
    ) -> None:
        """`output`: what the forward returns, with `ValueRef` in the places of values. `stage_of`: of each part."""
        self.inputs, self.output = inputs, output
        self.runs = 0
        self.shapes: list[torch.Size] = []
        """of the tensors that it returns, where that is known beforehand"""
        self.once: list[Step] = []
        """what a call does before, on every rank, not for each micro-batch"""
        self.order = [step.part for step in steps if step.part is not None]
        self.number = zlib.crc32("\n".join(map(_said, steps)).encode())
        """the same for programs that do the same"""
        made: dict[int, int | None] = dict.fromkeys(range(inputs))
        """value → its stage, None where everybody can have it"""
        maker: dict[int, Step] = {}
        for step in steps:
            before = [stage for number in step.needs() if (stage := made[number]) is not None]
            earliest = max(before, default=None)
            if step.part is not None:
                step.stage = stage_of(step.part)
                if earliest is not None and earliest > step.stage:
                    raise OutOfOrder(self.order)
            else:
                step.stage = max(before, default=0) if step.fixed else earliest
            for number in step.makes():
                if number not in made:
                    made[number] = step.stage
                    maker[number] = step
        wanted = {leaf.number for leaf in pytree.tree_leaves(output) if isinstance(leaf, ValueRef)}
        self.steps = [_of_stage(stage, steps, maker, wanted if stage == stages - 1 else ()) for stage in range(stages)]
        self.crossing: list[list[int]] = []
        """values that go from each stage to the next"""
        for stage in range(stages - 1):
            later = set(wanted)
            for following in range(stage + 1, stages):
                later |= {number for step in self.steps[following] for number in step.needs()}
            self.crossing.append(sorted(n for n in later if (at := made[n]) is not None and at <= stage))

    def modules(self, stage: int) -> list[nn.Module]:
        """Those that run there, each once."""
        parts = [step.call for step in self.steps[stage] if isinstance(step.call, nn.Module)]
        return list({id(module): module for part in parts for module in part.modules()}.values())

    @torch.no_grad()
    def begin(self) -> None:
        """Once for each call."""
        for step in self.once:
            _call(step, {})

    def run(self, stage: int, values: dict[int, Any]) -> None:
        """One stage's steps, on its values."""
        graph = torch.is_grad_enabled()
        for step in self.steps[stage]:
            with torch.set_grad_enabled(graph and step.grad):
                returned = _call(step, values)
            if step.whole is not None:
                values[step.whole] = returned
            elif step.outs:
                for number, leaf in zip(step.outs, pytree.tree_leaves(returned), strict=True):
                    if number is not None:
                        values[number] = leaf
            if step.edits is not None:
                old, new = step.edits
                values[new] = values[old]

    def result(self, values: dict[int, Any]) -> Any:
        return pytree.tree_map(lambda leaf: _found(leaf, values), self.output)


def _said(step: Step) -> str:
    """What a step does, as every rank would say it."""
    name = getattr(step.call, "__qualname__", None) or type(step.call).__qualname__
    return f"{name} {step.part} {step.needs()} {step.whole} {step.outs} {step.edits} {step.grad}"


def _call(step: Step, values: dict[int, Any]) -> Any:
    args, kwargs = pytree.tree_map(lambda leaf: _found(leaf, values), (step.args, step.kwargs))
    return step.call(*args, **kwargs)


def _found(leaf: Any, values: dict[int, Any]) -> Any:
    if isinstance(leaf, ValueRef):
        return values[leaf.number]
    return leaf.get() if isinstance(leaf, HeldTensor) else leaf


def _of_stage(stage: int, steps: list[Step], maker: dict[int, Step], wanted: Iterable[int]) -> list[Step]:
    """Its own, and those that everybody does who needs them, in their order."""
    chosen = {id(step) for step in steps if step.stage == stage}
    todo = [*wanted, *(number for step in steps if id(step) in chosen for number in step.needs())]
    seen: set[int] = set()
    while todo:
        number = todo.pop()
        step = maker.get(number)
        if number in seen or step is None:
            continue
        seen.add(number)
        if step.stage is None and id(step) not in chosen:
            chosen.add(id(step))
            todo += step.needs()
    return [step for step in steps if id(step) in chosen]


def chain_program(staged: StagedModel) -> Program:
    """The program of a Sequential."""
    steps = [
        Step(part, (ValueRef(number),), {}, whole=number + 1, part=number, fixed=True)
        for number, part in enumerate(staged.parts)
    ]
    return Program(steps, 1, ValueRef(len(steps)), len(staged.counts), staged.stage_of)


def plan_of(programs: list[Program]) -> int:
    """A number, the same for micro-batches whose programs do the same."""
    return zlib.crc32(repr([program.number for program in programs]).encode()) if programs else 0
