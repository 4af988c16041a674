"""Moves random generators: their state is edited in place, so that a loader keeps the one that the notebook seeds."""

from __future__ import annotations

import sys
from typing import Any

from nbtrain.compat import numpy_random
from nbtrain.exchange.kinds.base import Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.objects import SENTINEL


class TorchGeneratorKind(Kind):
    """A `torch.Generator`. Twins on different sorts of devices keep a state each: they cannot share one."""

    name = "torch generator"
    lasting = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        return node.obj.device.type

    def make(self, args: Any, receiver: Receiver) -> Any:
        import torch

        return torch.Generator(receiver.device(args))

    def look(self, node: Node, walk: Sender) -> Any:
        state = bytes(node.obj.get_state().numpy())
        if state == node.seen:
            return None
        node.seen = state
        return state, node.obj.device.type

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        import torch

        data, device = state
        if node.obj.device.type == device:
            node.obj.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        node.seen = None


class BitGeneratorKind(Kind):
    """What a NumPy `Generator` or `RandomState` draws from; several may share one."""

    name = "bit generator"
    lasting = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        return type(node.obj), numpy_random.seed_sequence(node.obj)

    def make(self, args: Any, receiver: Receiver) -> Any:
        cls, seed = args
        return cls(seed)

    def look(self, node: Node, walk: Sender) -> Any:
        state = _plain(node.obj.state), getattr(numpy_random.seed_sequence(node.obj), "n_children_spawned", 0)
        if state == node.seen:
            return None
        node.seen = state
        return state

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        node.obj.state = _arrays(state[0])
        seed = numpy_random.seed_sequence(node.obj)
        children = state[1] - getattr(seed, "n_children_spawned", state[1])
        if children > 0:  # the other side spawned some, and the same may not come twice
            seed.spawn(children)
        node.seen = None


class NumpyGeneratorKind(Kind):
    """A `Generator` or `RandomState`: beside what it draws from, a `RandomState` keeps a spare normal number."""

    name = "numpy generator"
    lasting = True

    def make_args(self, node: Node, walk: Sender) -> Any:
        return type(node.obj), walk.encode(numpy_random.bit_generator(node.obj))

    def make(self, args: Any, receiver: Receiver) -> Any:
        cls, bits = args
        return cls(receiver.decode(bits))

    def look(self, node: Node, walk: Sender) -> Any:
        get = getattr(node.obj, "get_state", None)
        spare = None if get is None else tuple(get(legacy=False).get(key) for key in ("has_gauss", "gauss"))
        if (spare,) == node.seen:
            return None
        node.seen = (spare,)
        return spare

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        if state is not None:
            state_now = node.obj.get_state(legacy=False)
            state_now["has_gauss"], state_now["gauss"] = state
            node.obj.set_state(state_now)
        node.seen = None


def _plain(state: Any) -> Any:
    """A state that can be compared: its arrays as bytes."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return ("array", str(state.dtype), state.tobytes()) if hasattr(state, "tobytes") else state


def _arrays(state: Any) -> Any:
    import numpy as np

    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    if isinstance(state, tuple) and len(state) == 3 and state[0] == "array":
        return np.frombuffer(state[2], state[1]).copy()
    return state


TORCH: Kind = TorchGeneratorKind()
BITS: Kind = BitGeneratorKind()
NUMPY: Kind = NumpyGeneratorKind()


def kind_of(obj: Any) -> Kind | None:
    cls = type(obj)
    torch: Any = sys.modules.get("torch")
    if torch is not None and cls is getattr(torch, "Generator", None):
        return SENTINEL if obj is torch.default_generator else TORCH
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None or not cls.__module__.startswith("numpy.random"):
        return None
    if cls is numpy.Generator or cls is numpy.RandomState:
        return SENTINEL if numpy_random.is_global_state(obj) else NUMPY
    return BITS if isinstance(obj, numpy.BitGenerator) else None
