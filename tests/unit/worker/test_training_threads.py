"""Threads that train: one after the other is right, also where a pool keeps the thread; two at once is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest

from nbtrain.base.errors import NotSupported
from nbtrain.worker.ranks.training_threads import TrainingThreads

Train = Callable[[], None]


def executors(train: Train) -> None:
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool in (one, other, one):
            pool.submit(train).result()
        train()


def pools(train: Train) -> None:
    with ThreadPool(1) as one, ThreadPool(1) as other:
        for pool in (one, other, one):
            pool.apply(train)
        train()


def to_thread(train: Train) -> None:
    async def loop() -> None:
        for _ in range(20):
            await asyncio.to_thread(train)
            train()

    asyncio.run(loop())


def plain(train: Train) -> None:
    for _ in range(2):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    train()


@pytest.mark.parametrize("ways", [executors, pools, to_thread, plain])
def test_one_after_the_other_is_right(ways: Callable[[Train], None]) -> None:
    threads = TrainingThreads(0, True)
    ways(threads.enter)
    assert threads.refused is None


@pytest.mark.parametrize("by_pool", [True, False])
def test_two_at_the_same_time_are_refused(by_pool: bool) -> None:
    threads, entered, go_on = TrainingThreads(0, True), threading.Event(), threading.Event()

    def train() -> None:
        threads.enter()
        entered.set()
        go_on.wait(60)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        first = one.submit(train)
        try:
            assert entered.wait(60)
            with pytest.raises(NotSupported, match="two threads of the cell train at the same time"):
                other.submit(threads.enter).result() if by_pool else threads.enter()
        finally:
            go_on.set()
        first.result()
        with pytest.raises(NotSupported, match="two threads"):
            one.submit(threads.enter).result()
