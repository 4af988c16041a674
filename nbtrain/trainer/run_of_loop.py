"""What a written loop is given, and what holds while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from nbtrain.trainer.evaluation_parts import EvaluationParts
from nbtrain.trainer.module import provided, trainer_of


class Run:
    """What a loop is given. While it runs, the module has `self.log` and what else a step uses."""

    def __init__(self, trainer: EvaluationParts, module: Any, given: list[Any]) -> None:
        self.trainer, self.module, self.given = trainer, module, given

    def __enter__(self) -> None:
        self._held = ExitStack()
        self._held.enter_context(provided(self.module, self.trainer))
        self._held.enter_context(trainer_of(self.trainer.datamodule, self.trainer))
        self._held.enter_context(_flags(self.trainer))
        self.trainer.enter()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.trainer.leave(error)
        finally:
            self._held.close()
            del self._held


@contextmanager
def _flags(trainer: EvaluationParts) -> Iterator[None]:
    """torch's own, for as long as the loop runs: ranks go on to other cells."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if trainer.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is not None:
        torch.backends.cudnn.benchmark = bool(trainer.benchmark)
    try:
        with torch.autograd.set_detect_anomaly(True) if trainer.detect_anomaly else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
