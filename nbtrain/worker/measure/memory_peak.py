"""Measures, and limits, the peak memory of a rank's card or process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
"""Options of the C library's `mallopt`: from what size on a block is mapped by itself, and so given back when it is
freed; and how much may be free at the heap's end before that is given back."""
EXACT = 1 << 16
"""A threshold so low that nothing that was freed is counted as if it were held."""
STACKS = 1 << 26
"""Room for the stacks of threads that start meanwhile, most of which they never use."""
QUICK = 1 << 25
"""What the C library would come to by itself where large blocks come and go; once set, it does not adapt any more."""


class MemoryPeak:
    """The most memory that the rank has had since this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._card = device if device.type == "cuda" else None
        self._most = 0
        self._known: int | None = None
        if self._card is not None:
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(self._card)
        else:
            _tell_allocator(("malloc_trim", 0), ("mallopt", M_MMAP_THRESHOLD, EXACT))
            self._before = _pages()["RssAnon"]
        self.begin()

    def begin(self) -> None:
        """Count the peak anew from here on: what is allocated before the first step is made once, and mostly freed."""
        if self._card is not None:
            for card in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(card)
            return
        self._most = 0
        with suppress(OSError), open("/proc/self/clear_refs", "w") as refs:  # the system counts its peak anew
            refs.write("5")

    def look(self) -> None:
        """Look at the memory now; called now and then, as not every system keeps the peak itself."""
        if self._card is None:
            self._most = max(self._most, _pages()["RssAnon"])

    def close(self) -> None:
        """Fix the result, and undo what makes allocation slower."""
        if self._known is None:
            self._known = self.bytes()
            if self._card is None:
                _tell_allocator(("mallopt", M_MMAP_THRESHOLD, QUICK), ("mallopt", M_TRIM_THRESHOLD, 2 * QUICK))

    def wait(self) -> None:
        """Wait until the card has finished its work."""
        if self._card is not None:
            torch.cuda.synchronize(self._card)

    def bytes(self) -> int:
        if self._known is not None:
            return self._known
        if self._card is not None:  # what uses several has them all in this process
            cards = range(torch.cuda.device_count())
            return max(torch.cuda.max_memory_allocated(card) for card in cards) - self._before
        now = _pages()
        counted = now.get("VmHWM", 0) - now.get("RssFile", 0) - now.get("RssShmem", 0)
        return max(0, max(self._most, counted, now["RssAnon"]) - self._before)

    @contextmanager
    def limited(self, more: int) -> Iterator[None]:
        """Inside, the rank can allocate at most `more` bytes."""
        if self._card is not None:
            total = torch.cuda.get_device_properties(self._card).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (self._before + more) / total), self._card)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, self._card)
            return
        try:
            import resource
        except ImportError:  # a system without
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = _pages().get("VmData", 0) + more + STACKS
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _pages() -> dict[str, int]:
    """What the system says of this process's memory, in bytes."""
    try:
        with open("/proc/self/status") as lines:
            fields = (line.split(":") for line in lines)
            return {name: int(size.split()[0]) * 1024 for name, size in fields if name.startswith(("Vm", "Rss"))}
    except OSError:
        import psutil

        return {"RssAnon": int(psutil.Process().memory_info().rss)}


def _tell_allocator(*calls: tuple[Any, ...]) -> None:
    """Call functions of the C library, each by its name and arguments."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    for name, *arguments in calls:
        with suppress(AttributeError):  # another C library
            getattr(library, name)(*arguments)
