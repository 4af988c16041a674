"""Formats numbers and options for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def size(count: float) -> str:
    """Bytes: 310 MB, 1.2 GB (powers of ten, as disks and models are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def span(sizes: Sequence[int]) -> str:
    """Bytes of several ranks, from the least to the most: `290–310 MB`; empty without any."""
    if not sizes:
        return ""
    low, high = size(min(sizes)), size(max(sizes))
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low}–{high}"


def quantity(value: float) -> str:
    """3,600 · 28.1 · 0.52"""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def time(seconds: float) -> str:
    """12 µs, 41.2 ms, 1.23 s"""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * one:
            return f"{quantity(seconds / one)} {unit}"
    return f"{quantity(seconds / 1e-6)} µs"


def measured(value: float, spread: float | None) -> str:
    """What was measured, and how far off it may be: 1,204 ± 31 · 28.1 ± 0.8"""
    shown = quantity(value)
    if spread is None:
        return shown
    decimals = len(shown.partition(".")[2])
    return f"{shown} ± {f'{spread:.2g}' if 'e' in shown else f'{spread:,.{decimals}f}'}"


def ranks(numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    words = list(names)
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def flags(options: Mapping[str, Any]) -> str:
    """Options as they are typed: `--stage 3 --cpu-offload`."""
    return " ".join(_flag("--" + name.replace("_", "-"), value) for name, value in options.items())


def plain(value: Any) -> Any:
    """An option as JSON can hold it: a class by its name."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return getattr(value, "__name__", None) or type(value).__name__


def _flag(flag: str, value: Any) -> str:
    if value is True:
        return flag
    if value is False:
        return f"--no-{flag[2:]}"
    several = value if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    shown = ",".join(f"{one:g}" if isinstance(one, float) else str(getattr(one, "__name__", one)) for one in several)
    return f"{flag} {shown}" if len(shown) < 40 else f"{flag} …"
