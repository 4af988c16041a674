"""What a rank imports: before its first step, and before it trains. All of it in the nursery, if there is time."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

BEFORE_A_STEP = ("torch.distributed", "nbtrain.strategies.ddp", "nbtrain.worker.runtime", "nbtrain.worker.rank")
DTENSOR = ("torch.distributed.tensor",)
BEFORE_TRAINING = ("sympy", "torch.fx.experimental.symbolic_shapes", *DTENSOR)
"""And torch's compiler, which an optimizer imports when it is made. Together they take as long as torch."""


def before_a_step() -> None:
    for name in BEFORE_A_STEP:
        import_module(name)


def dtensor() -> None:
    """Never while a cell runs: these keep functions of torch.distributed, and would keep what stands in their place."""
    for name in DTENSOR:
        import_module(name)


def before_training() -> list[Callable[[], Any]]:
    """One by one, so that who has something else to do need not wait for all."""
    from nbtrain.compat import compiler  # who only looks at this file may not have torch

    return [partial(_import, name) for name in (*BEFORE_TRAINING, compiler.MODULE)]


def of_notebook(name: str, file: str) -> None:
    """What the notebook has imported, its package from this file: by another path it may have found another one.

    Handlers that it makes for its logs write to the rank's output, not to that of the process in which it was imported.
    """
    spec = find_spec(name.partition(".")[0])
    if spec is None or spec.origin != file:
        return
    before = sys.stderr
    sys.stderr = CurrentStderr()
    try:
        _import(name)
    finally:
        sys.stderr = before


class CurrentStderr(io.TextIOBase):
    """Standard error, whatever it is when something is written: ranks have their own."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text) if not isinstance(sys.stderr, CurrentStderr) else len(text)

    def flush(self) -> None:
        if not isinstance(sys.stderr, CurrentStderr):
            sys.stderr.flush()


def _import(name: str) -> None:
    with suppress(Exception):  # where it is used, the error is told; until then nobody may need it
        import_module(name)
