"""Memory that the C library keeps for later, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def give_back() -> None:
    """What models in pieces gather and let go of, unit by unit, leaves the heap full of holes: hundreds of megabytes
    that nobody uses, and that the machine's other processes could."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
