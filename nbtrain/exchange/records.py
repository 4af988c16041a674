"""Pickles what a walk has found, and opens such a pickle."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle as cp

from nbtrain.exchange.gc_paused import gc_paused
from nbtrain.exchange.graph.changes import Changes
from nbtrain.exchange.kinds.base import Make, Packed, Put, Ref


class _Quick(pickle.Pickler):
    """Asks Python about nothing but references: a large model has thousands of them, and little else.

    What is in a record is an atom, something importable or a code object; whatever is not is left to cloudpickle.
    """

    dispatch_table = {
        **cp.Pickler.dispatch_table,
        Ref: lambda ref: (Ref, (ref.key,)),
        Packed: lambda packed: (Packed, (packed.kind, packed.parts)),
    }


@gc_paused()
def dump(cargo: Changes) -> bytes:
    records: list[tuple[Any, ...]] = []
    for record in cargo.records:
        if type(record) is Make:
            place = () if record.place is None else (record.place,)
            records.append((record.key, record.kind, record.args, record.anew, *place))
        elif type(record) is Put:
            records.append((record.key, record.state))
    file = io.BytesIO()
    try:
        _Quick(file, 5).dump((records, cargo.names))
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        cp.Pickler(file, protocol=5).dump((records, cargo.names))
    return file.getvalue()


@gc_paused()
def load(stream: bytes) -> Changes:
    records, names = pickle.loads(stream)
    return Changes([Make(*record) if len(record) > 2 else Put(*record) for record in records], [], names)
