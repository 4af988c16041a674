"""Opens what ranks would be sent, in a scratch process, to find out whether they could."""

from __future__ import annotations

import sys

from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel
from nbtrain.exchange.kinds import numeric
from nbtrain.exchange.parcel import Opener, Parcel


def open_parcel(parcel: Parcel) -> str | None:
    """Why it could not be opened."""
    numeric.learn_atoms()
    try:
        cargo, buffer = Opener().open(parcel)
        OpenedParcel(ObjectTable(-1, -1), vars(sys.modules["__main__"]), cargo, buffer, lambda kind: "cpu").commit()
    except Exception as error:  # a class may raise anything
        return str(error)
    return None
