"""torch_xla. Nothing here imports it before it is used. Read in torch_xla 2.9; it was run on XLA's CPU device only."""

from __future__ import annotations

from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch_xla")

its.members("torch_xla._internal.pjrt", "initialize_multiprocess", "initialize_singleprocess")


def runtime() -> Any:
    """The module that gives this process its own device. Under torchrun
    `init_process_group("xla", init_method="xla://")` does that, and opens a port besides. Raises ImportError."""
    from torch_xla._internal import pjrt

    return pjrt
