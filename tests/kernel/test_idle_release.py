"""Ranks that nobody uses give their GPUs back, and nothing is lost by it."""

from __future__ import annotations

import time

import pytest

from tests.support.kernels import Kernel

RANKS = """
from nbtrain.notebook.magics.extension import _LOADED
from nbtrain.notebook.pool.idle_release import IdleRelease
(extension,) = _LOADED.values(); ranks = extension.state.session.ranks
"""
"""Those of the notebook: on a CPU they have no clock, and are given one by hand, set to a moment."""


@pytest.mark.thorough
def test_ranks_given_back_are_known_to_be_gone_before_the_news_of_it(kernel: Kernel) -> None:
    assert kernel.run("%load_ext nbtrain\nx = [1]").error is None
    assert kernel.run("%%distributed --devices 2\nx.append(rank)").error is None
    seen = kernel.run(
        RANKS + "clock = ranks._idle = IdleRelease(ranks._give_back, 0); ranks.rest(); clock._timer.join(10)\n"
        "heard, ranks.listen = ranks.listen, lambda seconds: None\n"
        "print(ranks.have(ranks.pool.spec)); ranks.listen = heard"
    )
    assert seen.error is None
    assert "idle for 30 minutes" in seen.stdout
    assert kernel.run("%%distributed --devices 2\nx.append(rank)\nprint(x)").error is None


def test_idle_ranks_end_and_the_next_cell_carries_on(kernel: Kernel) -> None:
    assert kernel.run("%load_ext nbtrain\nx = [1]").error is None
    assert kernel.run("%%distributed --devices 2\nx.append(rank + world_size)").error is None
    seen = kernel.run(
        RANKS + "ranks._idle = IdleRelease(ranks._give_back, 0.1); ranks.rest()\n"
        "import time; pids = ranks.pool.pids().values(); print(len(pids))"
    )
    assert seen.stdout == "2\n", seen.error
    until = time.monotonic() + 10
    while len(kernel.children()) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(kernel.children()) == 1, "only the process that ranks are forked from is left"
    result = kernel.run("%%distributed --devices 2\nx.append(rank)")
    assert result.error is None
    assert "idle for 30 minutes" in result.stdout
    assert kernel.run("print(x)").stdout == "[1, 2, 0]\n"


@pytest.mark.thorough
def test_idle_ranks_that_hold_a_failed_cells_steps_live_on(kernel: Kernel) -> None:
    start = "%load_ext nbtrain\nimport torch\nm = torch.nn.Linear(1, 1); o = torch.optim.SGD(m.parameters(), 1)"
    assert kernel.run(start).error is None
    step = "m(torch.ones(1, 1)).sum().backward()"
    assert kernel.run(f"%%distributed --devices 2\n{step}; o.step(); o.zero_grad(); {step}; raise ValueError").error
    seen = kernel.run(
        RANKS + "clock = ranks._idle = IdleRelease(ranks._give_back, 0.01); ranks.rest(); clock._timer.join(10)\n"
        "print(clock.released)"
    )
    assert seen.stdout == "False\n", seen.error
    assert "until step 1" in kernel.run("%distributed recover").stdout
