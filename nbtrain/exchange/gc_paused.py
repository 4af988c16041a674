"""No garbage collection while many objects are made that all stay."""

from __future__ import annotations

import gc
from contextlib import ContextDecorator
from typing import Any


class calm(ContextDecorator):
    """Thousands of new nodes would make Python search everything torch has imported, for a tenth of a second."""

    def _recreate_cm(self) -> calm:
        return calm()

    def __enter__(self) -> None:
        self.collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: Any) -> None:
        if self.collects:
            gc.enable()
