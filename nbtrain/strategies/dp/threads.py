"""Threads that compute parts of a batch, each in the context of the thread that asked: autocast, device and so on."""

from __future__ import annotations

import contextvars
import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from nbtrain.compat import autograd_engine, fake_tensors

PATIENCE = 1.0
"""Seconds for threads that were told to stop. Then they are left behind, and end by themselves."""
KINDS = ("cpu", "cuda")


def carried() -> bool:
    """Whether another thread can have all the context of this one. Modes of torch's, and hooks on what a graph saves,
    belong to one thread."""
    return not (fake_tensors.function_modes() or fake_tensors.dispatch_modes() or autograd_engine.saves_by_hooks())


class _Job:
    def __init__(self, work: Callable[[], Any], cores: int) -> None:
        self.work = work
        self.cores = cores
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.result = self.context.run(self.work)
        except BaseException as error:  # raised by who waits for the thread
            self.error = error
        finally:
            self.done.set()


class _Worker:
    def __init__(self, number: int) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, name=f"nbtrain-dp-{number}", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        cores = torch.get_num_threads()  # asked for once, or the first operation would set it again
        with suppress(SystemExit):  # told to stop
            while (job := self.jobs.get()) is not None:
                if job.cores != cores:
                    cores = job.cores
                    torch.set_num_threads(cores)
                job.run()
                del job


class Threads:
    """Computes works in parallel: the first in the thread that asks, each of the others in a thread of its own.

    Each of them has a team of torch's threads, and teams larger than their share of the cores wait for each other,
    spinning: a small step takes ten times as long. So the parts have equal shares of the cores while they run.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._workers: list[_Worker] = []

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """What they return, in order. Raises what the first of them raises, once all have ended."""
        cores = torch.get_num_threads()
        share = max(1, cores // len(works))
        torch.set_num_threads(share)
        try:
            return self._run(works, share)
        finally:
            torch.set_num_threads(cores)

    def _run(self, works: Sequence[Callable[[], Any]], cores: int) -> list[Any]:
        while len(self._workers) < len(works) - 1:
            self._workers.append(_Worker(len(self._workers) + 1))
        jobs: list[_Job] = []
        for work, device in zip(works[1:], self.devices[1:], strict=False):
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            jobs.append(_Job(_in_context(work, device, stream), cores))
        for job, worker in zip(jobs, self._workers, strict=False):
            worker.jobs.put(job)
        try:
            try:
                first = works[0]()
            except Exception:
                for job in jobs:
                    job.done.wait()
                raise
            for job in jobs:
                job.done.wait()
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: nobody waits for what is still computed
                self._cut_short(jobs)
            raise
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [first, *(job.result for job in jobs)]

    def _cut_short(self, jobs: Sequence[_Job]) -> None:
        workers, self._workers = self._workers, []
        for job, worker in zip(jobs, workers, strict=False):
            if not job.done.is_set() and worker.thread.ident is not None:
                ident = ctypes.c_ulong(worker.thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        self._end(workers)

    def close(self) -> None:
        workers, self._workers = self._workers, []
        self._end(workers)

    def _end(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.jobs.put(None)
        for worker in workers:
            worker.thread.join(PATIENCE)


def _in_context(work: Callable[[], Any], device: torch.device, stream: Any) -> Callable[[], Any]:
    """The work, in this thread's autograd and autocast state, whichever thread runs it."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind)]

    def run() -> Any:
        with ExitStack() as around:
            if inference:
                around.enter_context(torch.inference_mode())
            around.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                around.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            if stream is not None:
                around.enter_context(torch.cuda.device(device))
                around.enter_context(torch.cuda.stream(stream))
            return work()

    return run
