"""What a strategy is told about a model, and its answer: the memory that a rank needs. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One parameter of a model."""

    name: str
    """`layers.0.up.weight`"""
    numel: int
    bytes: int
    trains: bool
    state: int
    """bytes of optimizer state that it has, or will have after a step"""
    unit: int
    """which of the profile's units it belongs to; -1: none"""


class HasWeights:
    """Sums over weights: of a model, or of the part of it that one rank has."""

    weights: Sequence[Weight]

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
    def largest(self) -> int:
        """Bytes of the largest gradient."""
        return max((weight.bytes for weight in self.weights if weight.trains), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A block of the model, which is sharded, or put into a stage, as one. Its weights are in no inner unit."""

    path: str
    """`layers.0`; empty: what is left to the model itself"""
    kind: str
    """the class's name"""
    activations: int
    """bytes that its forward makes and that wait for the backward"""
    output: int
    """bytes of what it returns"""


class Moment(NamedTuple):
    """A moment of the backward. Moments are in order, and the first is the end of the forward."""

    activations: int
    """bytes alive that are neither weights nor gradients of weights"""
    gradients: int
    """bytes of those gradients of weights that exist by then"""


@dataclass(frozen=True, kw_only=True)
class Profile(HasWeights):
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
    """bytes that the optimizer's step takes for a moment, in addition to its state"""
    optimizer: str
    """`AdamW`"""
    samples: int
    """in the batch"""
    precision: str
    """one of PRECISIONS, which it was made under"""
    recomputed: tuple[str, ...] = ()
    """classes of the units whose activations are computed again"""
    step_together: int = 0
    """`step`, where torch steps all weights at once (`foreach`), as it does on GPUs"""
    notes: tuple[str, ...] = ()
    """its assumptions, in sentences"""

    @cached_property
    def activations(self) -> int:
        """The largest number of bytes at any moment."""
        return max((moment.activations for moment in self.moments), default=0)

    @cached_property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks and devices that a model is to be trained on."""

    ranks: int
    kind: str = "cpu"
    """`cpu` or `cuda`"""
    nodes: int = 1
    devices: int = 1
    """of one rank; more than 1 under strategies that use several together"""
    precision: str = "32"
    accumulate: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes on the rank (under `dp`: on the device) that has the most."""

    parameters: int
    gradients: int
    """at most"""
    optimizer: int
    activations: int
    """at most"""
    buffers: int
    """what the strategy holds in addition, at most: buckets, gathered units, copies in another precision"""
    kept: int
    """what of all that exists when a step has ended and gradients have not been zeroed"""
    peak: int
    """the most at one time, which is less than the sum where not all exists at once"""
    sent: int
    """by one rank, in one step"""
    host: int = 0
    """of the machine's memory, per rank, where parts are kept there and the device is a GPU"""
    notes: tuple[str, ...] = ()
    """further things to know, in sentences"""
