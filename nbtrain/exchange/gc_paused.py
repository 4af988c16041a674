"""No garbage collection while many objects are made that all stay."""

from __future__ import annotations

import gc
from contextlib import ContextDecorator
from typing import Any


class gc_paused(ContextDecorator):
    """Thousands of new nodes would make Python search everything torch has imported, for a tenth of a second."""

    def _recreate_cm(self) -> gc_paused:
        return gc_paused()

    def __enter__(self) -> None:
        self.collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: Any) -> None:
        if self.collects:
            gc.enable()
