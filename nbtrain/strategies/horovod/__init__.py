"""`horovod`: as ddp, and what travels between the ranks is Horovod's: its background threads, fusion and compression.

It runs on nbtrain's own ranks: there is no horovodrun. `hvd.init()` is called before the cell, so that what is written
against Horovod (`hvd.rank()`, `hvd.allreduce(x)`) works in it. Optimizers and models stay as they are: nothing has to
be wrapped, and nothing is broadcast by a step that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from nbtrain.strategies.base import Component, Prepared, Strategy
from nbtrain.strategies.horovod.allreduce import HorovodAllReduce
from nbtrain.strategies.horovod.session import HorovodSession
from nbtrain.strategies.kit.gradient_buckets import BucketOptions
from nbtrain.strategies.kit.profile_arithmetic import replicated
from nbtrain.strategies.kit.replicated import Replicated
from nbtrain.strategies.memory_estimate import Estimate, Profile, World


class Horovod(Strategy):
    """Data parallel training of whole models by Horovod."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Options(BucketOptions):
        compression: Literal["none", "fp16"] = "none"
        """fp16: gradients are sent in 16 bits"""

    def __init__(self, options: Any = None, **given: Any) -> None:
        super().__init__(options, **given)
        self._session: HorovodSession | None = None
        self._count = 0

    def estimate(self, profile: Profile, world: World) -> Estimate:
        half = self.options.compression == "fp16"
        return replicated(profile, world, self.options.bucket_mb, lambda size: 2 if half else max(size, 4))

    def set_up(self, component: Component, precision: str = "32") -> Prepared:
        if not (dist.is_available() and dist.is_initialized()):  # one device: there is nobody to average with
            return Prepared(component)
        self._count += 1
        all_reduce = HorovodAllReduce(self._horovod(), str(self._count), self.options.compression == "fp16")
        return Replicated(component, self.options.bucket_mb, all_reduce)

    @contextmanager
    def running(self) -> Iterator[None]:
        if not (dist.is_available() and dist.is_initialized()):
            yield
            return
        self._horovod().start()
        try:
            yield
        finally:
            self._horovod().stop()

    def _horovod(self) -> HorovodSession:
        if self._session is None:
            self._session = HorovodSession(self.place)
        return self._session
