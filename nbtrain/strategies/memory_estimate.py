"""What a strategy is told of a model, and what it says of the memory that takes: numbers only, nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One parameter."""

    name: str
    """`layers.0.up.weight`"""
    numel: int
    bytes: int
    trains: bool
    state: int
    """bytes of optimizer state that it has or comes to have"""
    unit: int
    """which of the profile's units it belongs to; -1: none"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What is sharded, or put into a stage, as one: a block of the model. Its weights are in no inner unit."""

    path: str
    """`layers.0`; empty: what is left to the model itself"""
    kind: str
    """the class's name"""
    activations: int
    """bytes made in its forward that wait for the backward"""
    output: int
    """bytes of what it returns"""


class Moment(NamedTuple):
    """A moment of the backward, in the order of time; the first is the end of the forward."""

    activations: int
    """bytes alive that are neither weights nor gradients of weights"""
    gradients: int
    """bytes of the gradients of weights that are there"""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One forward, backward and optimizer step of one model with one batch, in one process."""

    model: str
    """what the user calls it"""
    weights: tuple[Weight, ...]
    units: tuple[Unit, ...]
    """in the order in which they are called"""
    buffers: int
    """bytes of running means and the like"""
    moments: tuple[Moment, ...]
    step: int
    """bytes that the optimizer's step takes for a moment, besides its state"""
    optimizer: str
    """`AdamW`"""
    samples: int
    """in the batch"""
    precision: str
    """one of PRECISIONS, which it was made under"""
    operations: float = 0.0
    """of floating point, in one step; 0: not counted"""
    recomputed: tuple[str, ...] = ()
    """classes of what computes its activations again"""
    step_together: int = 0
    """the same where torch steps all weights at once (`foreach`), as it does on GPUs"""
    notes: tuple[str, ...] = ()
    """what it assumes, in sentences"""

    @cached_property
    def parameters(self) -> int:
        return sum(weight.bytes for weight in self.weights)

    @cached_property
    def gradients(self) -> int:
        return sum(weight.bytes for weight in self.weights if weight.trains)

    @cached_property
    def state(self) -> int:
        return sum(weight.state for weight in self.weights)

    @cached_property
    def activations(self) -> int:
        """At the most."""
        return max((moment.activations for moment in self.moments), default=0)

    @cached_property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Where it is to be trained."""

    ranks: int
    kind: str = "cpu"
    """`cpu` or `cuda`"""
    nodes: int = 1
    devices: int = 1
    """that one rank has; more than 1 under strategies that use them together"""
    precision: str = "32"
    accumulate: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes of the rank (under `dp`: of the device) that has the most."""

    parameters: int
    gradients: int
    """at the most"""
    optimizer: int
    activations: int
    """at the most"""
    buffers: int
    """what the strategy holds besides, at the most: buckets, gathered units, copies in another precision"""
    kept: int
    """of all that: what is there when a step has ended and gradients have not been let go of"""
    peak: int
    """at the most, which is less than the sum where not all of it is there at once"""
    sent: int
    """by one rank, in one step"""
    host: int = 0
    """of the machine's memory, per rank, where parts are kept there and the device is a GPU"""
    notes: tuple[str, ...] = ()
    """what has to be known besides, in sentences"""
