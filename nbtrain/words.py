"""Numbers for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes: 310 MB, 1.2 GB (powers of ten, as disks and models are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 99.5 or unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
