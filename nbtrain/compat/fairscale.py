"""FairScale's OSS and ShardedDataParallel. Nothing here imports FairScale before it is used.

FairScale's last release, 0.4.13 of 2022, runs with a new torch: it takes public names, the autograd engine's
`queue_callback` and hooks on the nodes that accumulate gradients, all still there, and on import, in parts that nobody
here calls, names that have gone out of use, which leave warnings. Its buffers for small gradients are switched off:
`zero_grad()` sets gradients to None now, so they would never be zeroed. Of OSS nothing is used but who owns what and
the sending after a step; the optimizer inside never steps. FairScale's own hooks are taken off: nbtrain calls its
reductions from `register_post_accumulate_grad_hook`. It has no wheel, and its setup wants the setuptools and torch
that are there: `pip install --no-build-isolation`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from nbtrain.compat.internals import Internals


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of FairScale, when it is imported or made, about what torch has renamed since."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


its = Internals("fairscale", around=quiet)

_OSS = "fairscale.optim.oss.OSS"
_PARALLEL = "fairscale.nn.data_parallel.sharded_ddp.ShardedDataParallel"
its.fields(_OSS, "buckets")
its.members(_OSS, "_param_to_rank", "_per_device_params", "_broadcast_params", "refresh_trainable")
its.members(_PARALLEL, "refresh_trainable", "_clear_counters", "_consume_work_handles", "_setup_backward_hooks")
its.fields(
    _PARALLEL,
    *("_grad_hooks", "_trainable_params", "_manual_reduce", "_work_handles", "_bucket_flush_callback_set"),
)


def classes() -> tuple[Any, Any]:
    """(OSS, ShardedDataParallel)"""
    with quiet():
        return (
            import_module("fairscale.optim.oss").OSS,
            import_module("fairscale.nn.data_parallel.sharded_ddp").ShardedDataParallel,
        )


# --- OSS -----------------------------------------------------------------------------------------


def owners(oss: Any) -> Mapping[Any, int]:
    """parameter → the rank that steps it"""
    ranks: Mapping[Any, int] = oss._param_to_rank
    return ranks


def send(oss: Any) -> None:
    """Send each parameter from its owner to all. Collective."""
    oss._broadcast_params()


def memory(oss: Any) -> Iterator[tuple[int, int]]:
    """The ranges of addresses in which parameters lie that are sent together."""
    for by_rank in oss.buckets.values():
        for bucket in by_rank.values():
            start = bucket.buffer.data_ptr()
            yield start, start + bucket.buffer.numel() * bucket.buffer.element_size()


# --- ShardedDataParallel -----------------------------------------------------------------------------


def refresh(parallel: Any) -> dict[int, Callable[[], None]]:
    """Make the reductions anew, after parameters were frozen or thawed: id of a parameter → what sends its gradient to
    its owner. Only the caller calls them, as FairScale's own hooks are taken off."""
    with quiet():
        parallel.refresh_trainable()
    while parallel._grad_hooks:
        parallel._grad_hooks.pop().remove()
    trained = parallel._trainable_params
    return {id(p): reduce for p, reduce in zip(trained, parallel._manual_reduce, strict=True)}


def begin(parallel: Any) -> None:
    """Begin a backward: none of its gradients has been sent."""
    parallel._clear_counters()
    parallel._bucket_flush_callback_set = True  # else it would wait for them when the backward ends: `finish` does


def finish(parallel: Any) -> None:
    """Wait until everything sent has arrived."""
    parallel._consume_work_handles()


def forget(parallel: Any) -> None:
    """Do not wait for what was sent."""
    parallel._work_handles.clear()
