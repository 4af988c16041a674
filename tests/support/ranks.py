"""Real ranks for tests: forked processes with a gloo group over a file, always reaped."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(AssertionError):
    """What a rank raised, as text."""


def run_on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60) -> list[Any]:
    """`function(rank, *args)` on every rank; what they returned, in order of rank. Raises what failed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(function, args, rank, world_size, os.path.join(folder, "store")) for rank in range(world_size)]
        try:
            answers = _collect([pipe for _, pipe in ranks], time.monotonic() + timeout)
        finally:
            ended = [_reaped(pid, pipe) for pid, pipe in ranks]
    failures = [f"rank {rank} ({ended[rank]}):\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failures:
        raise RankFailed("\n".join(failures))
    return [value for _, value in answers]


def on_ranks(test: Callable[[int], Any]) -> Callable[[], None]:
    """Makes a test of what every rank is to do."""

    def run() -> None:
        run_on_ranks(test)

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


def without_group(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(rank, *args)` as the one process, which is in no process group: for `run_on_ranks`."""
    dist.destroy_process_group()
    try:
        return function(rank, *args)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _fork(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: str
) -> tuple[int, int]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        os.close(reading)
        gc.freeze()  # as real ranks do: a collection need not look at all that the tests have imported
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
            answer = (True, function(rank, *args))
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(writing, "wb") as out:
            pickle.dump(answer, out)
    finally:
        os._exit(0)


def _reaped(pid: int, pipe: int) -> str:
    """How a rank has ended: with its answer given it only has to leave; without, it will not do so by itself."""
    os.close(pipe)
    known, status = os.waitpid(pid, os.WNOHANG)
    if known == 0:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "ended by the test"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def _collect(pipes: list[int], deadline: float) -> list[tuple[bool, Any]]:
    texts: dict[int, bytes] = dict.fromkeys(pipes, b"")
    answers: dict[int, tuple[bool, Any]] = {}
    grace = deadline
    while len(answers) < len(pipes):
        ready, _, _ = select.select([p for p in pipes if p not in answers], [], [], max(0, grace - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            if data := os.read(pipe, 1 << 20):
                texts[pipe] += data
                continue
            answers[pipe] = pickle.loads(texts[pipe]) if texts[pipe] else (False, "ended without an answer")
            if not answers[pipe][0]:
                grace = min(deadline, time.monotonic() + 3)  # its peers may wait for it forever
    return [answers.get(pipe, (False, "no answer (waiting for another rank?)")) for pipe in pipes]
