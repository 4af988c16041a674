"""A parcel being opened: all of it is made and understood before anything of the receiver's is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.errors import CannotTravel
from nbtrain.exchange import kinds
from nbtrain.exchange.calm import calm
from nbtrain.exchange.kinds.base import Make, Packed, Put, Ref
from nbtrain.exchange.order import in_turn
from nbtrain.exchange.table import Node, Table
from nbtrain.exchange.trace import path_to
from nbtrain.exchange.walk import Cargo

Buffers = Callable[[int], memoryview]


class Arrival:
    """Raises `CannotTravel`, naming the object, when one that could be packed cannot be made here."""

    @calm()
    def __init__(
        self,
        table: Table,
        namespace: dict[str, Any],
        cargo: Cargo,
        buffers: Buffers,
        device: Callable[[str], str] = str,
        renew: Callable[[int, int], bool] = lambda where, address: False,
    ) -> None:
        self.table = table
        self.namespace = namespace
        self.buffer = buffers
        self.device = device
        """where a tensor that was on this device is to live here"""
        self.renew = renew
        """whether the memory at an address shows the sender's buffer, now that it was written again"""
        self._cargo = cargo
        self._made: dict[int, Node] = {}
        self._puts: list[Put] = []
        for record in cargo.records:
            if type(record) is Put:
                self._puts.append(record)
            elif type(record) is Make and (record.anew or record.key not in table.nodes):
                kind = kinds.kind_named(record.kind)
                obj = self._attempt(record.key, kind.make, record.args, self)
                node = self._made[record.key] = Node(record.key, obj, kind)
                kind.made(node, record.args, self)
        self._own: list[Put] = []
        new: list[Put] = []
        for put in self._puts:
            node = self.node(put.key)
            (self._own if node.kind.leaf or put.key not in self._made else new).append(put)
        for put in in_turn(new, self._turn):
            node = self._made[put.key]
            self._attempt(put.key, node.kind.put, node, put.state, self)
        self.names = {name: self.decode(value) for name, value in cargo.names.items()}

    def node(self, key: int) -> Node:
        made = self._made.get(key)
        return made if made is not None else self.table.nodes[key]

    def twin(self, key: int) -> Any:
        """This side's object for a key."""
        return self.node(key).obj

    def decode(self, value: Any) -> Any:
        kind = type(value)
        if kind is Ref:
            return self.node(value.key).obj
        if kind is Packed:
            return kinds.kind_named(value.kind).join(tuple(map(self.decode, value.parts)))
        return value

    @calm()
    def commit(self) -> list[Node]:
        """Edit the receiver's own objects. Returns the nodes that are new or changed."""
        table, touched = self.table, {}
        for key, made in self._made.items():
            node = table.nodes.get(key)
            if node is None:
                table.adopt(made)
                node = made
            else:
                table.replace(node, made.obj, made.kind)
                node.seen, node.fixed = made.seen, made.fixed
            touched[key] = node
        for put in in_turn(self._own, self._turn):
            node = touched[put.key] = table.nodes[put.key]
            self._attempt(put.key, node.kind.put, node, put.state, self)
        for put in self._puts:
            touched[put.key].kind.settle(touched[put.key])
        return list(touched.values())

    def _turn(self, put: Put) -> int:
        node = self.node(put.key)
        return node.kind.turn(node.obj)

    def _attempt(self, key: int, act: Callable[..., Any], *args: Any) -> Any:
        """User code may run here: a `__setstate__`, a `__hash__`, whatever an object's own pickle calls."""
        try:
            return act(*args)
        except CannotTravel:
            raise
        except Exception as error:
            path = path_to(key, self._cargo, self.table, self.namespace)
            raise CannotTravel(
                f"{path} was packed but cannot be made again: {type(error).__name__}: {error}; make it inside the "
                "cell, or give its class __getstate__ and __setstate__ that fit together"
            ) from error


