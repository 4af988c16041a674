"""Process groups of torch.distributed. All of it is there in torch 2.8 to 2.15."""

from __future__ import annotations

import datetime
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("torch")

MAKE = "torch.distributed.distributed_c10d._new_process_group_helper"
"""Makes every group, also those of `new_group` and of device meshes."""
its.members("torch.distributed.distributed_c10d", "_new_process_group_helper", "_abort_process_group")
its.takes("torch.distributed.rendezvous.rendezvous", "url", "rank", "world_size")


def abort() -> None:
    """End NCCL's communicators: whoever waits in one gets an error. There is no public way for all of them."""
    import torch.distributed.distributed_c10d as c10d

    c10d._abort_process_group()


def meet(url: str, rank: int, world_size: int, timeout: datetime.timedelta, prefix: str) -> Any:
    """The store at this address, as `init_process_group` makes it, but with a prefix: torch uses the same names for
    every group, and a store may outlive its group."""
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(prefix, store)
