"""Reads and writes bandwidths: 25GB/s, 100Gbit/s, 3.2TB/s; a bare number is GB/s."""

from __future__ import annotations

import math
import re

from nbtrain.humanize import size

POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_FORM = re.compile(r"(\d+\.?\d*|\.\d+)\s*(?:([kmgt]?)(i?)(bits?|bytes?|b)\s*(?:/\s*s|ps)?)?", re.I)
_HOW = "write it as 25GB/s or 200Gbit/s"


def read(text: str) -> float:
    """Bytes per second. Raises a ValueError that says in a sentence what is wrong."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no bandwidth: {_HOW}")
    number, prefix, binary, unit = found.groups()
    if unit == "b" and prefix in ("g", "m", "t"):  # who writes gb may well mean GB
        said = number + prefix.upper()
        raise ValueError(f"{text!r} may be bits or bytes: write {said}B/s or {said}bit/s")
    if unit is None:
        prefix, unit = "g", "B"
    base = 1024 if binary else 1000
    value: float = float(number) * base ** POWERS[(prefix or "").lower()]
    if unit == "b" or unit.lower().startswith("bit"):
        value /= 8
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is no bandwidth: it has to be more than 0; {_HOW}")
    return value


def words(rate: float) -> str:
    """`25 GB/s`"""
    return f"{size(rate)}/s"
