"""Growth: what is fitted of made-up machines, whose figures are known, and what is said where less was measured."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from nbtrain.annexes.planning.growth.growth import MeasuredStep, fit, ring
from nbtrain.annexes.planning.growth.growth_table import GrowthForecast

GRADIENTS = 400e6


def machine(*counts: int, cores: float = 0) -> list[MeasuredStep]:
    """What is measured where a rank computes 0.2 s, bytes go at 4 GB/s and a round takes 2 ms."""
    found = []
    for ranks in counts:
        waits = max(1.0, ranks / cores) if cores else 1.0
        seconds = waits * (0.2 + ring(GRADIENTS)(ranks) / 4e9 + 2e-3 * math.log2(ranks))
        found.append(MeasuredStep(ranks=ranks, seconds=seconds, samples=32 * ranks, cores=cores))
    return found


def forecast(points: list[MeasuredStep], rate: float = 1e9, sent: float = GRADIENTS) -> GrowthForecast:
    return GrowthForecast.of(fit(points, ring(sent)), rate)


@pytest.mark.parametrize("cores", [0, 2, 4, 64])
def test_the_machine_is_found_again(cores: float) -> None:
    growth = fit(machine(1, 2, 4, 8, cores=cores), ring(GRADIENTS))
    assert growth.compute == pytest.approx(0.2)
    assert growth.bandwidth == pytest.approx(4e9)
    assert growth.latency == pytest.approx(2e-3)
    assert growth.fitted == (1, 2, 4)
    check = growth.checks[-1]
    assert not check.fitted
    assert check.point.ranks == 8
    assert check.error == pytest.approx(0, abs=1e-6)


def test_what_a_step_takes_on_many_nodes() -> None:
    growth = fit(machine(1, 2, 4, 8, cores=2), ring(GRADIENTS))
    node, nodes = growth.predict(8, 1e9), growth.predict(64, 1e9)
    assert node.seconds == pytest.approx(0.2 + 2 * 7 / 8 * GRADIENTS / 4e9 + 3 * 2e-3)
    assert nodes.nodes == 8
    assert nodes.communication == pytest.approx(2 * 63 / 64 * GRADIENTS / 1e9 + 6 * 2e-3)
    assert nodes.seconds == pytest.approx(0.2 + nodes.communication)
    assert nodes.at_best == pytest.approx(nodes.communication)  # what is sent takes longer than what hides it
    assert growth.predict(64, 25e9).at_best == pytest.approx(0.2)
    assert nodes.samples == pytest.approx(64 * 32 / nodes.seconds)
    assert nodes.efficiency == pytest.approx(0.2 / nodes.seconds)
    # Faster than what a rank was seen to send it does not get by a faster network.
    fastest = growth.predict(64, 1e12)
    assert fastest.communication == pytest.approx(2 * 63 / 64 * GRADIENTS / 4e9 + 6 * 2e-3)


def test_what_cannot_be_told_is_said() -> None:
    assert "the bytes sent per step are not known" in repr(forecast(machine(1, 2), sent=0))
    two = repr(forecast(machine(1, 2)))
    assert "cannot separate bandwidth from latency" in two
    assert "Fitted on 1, 2 ranks, not checked." in two
    same = [MeasuredStep(ranks=ranks, seconds=0.1, samples=ranks) for ranks in (1, 2, 4)]
    assert "within one they take no time: none was found here" in repr(forecast(same))
    assert "4 and 8 ranks shared 2 cores here" in repr(forecast(machine(1, 2, 4, 8, cores=2)))
    assert "the stated 100 GB/s is faster than any rank was here" in repr(forecast(machine(1, 2, 4, 8), rate=100e9))


def test_a_check_that_misses_is_said_as_it_is() -> None:
    *few, last = machine(1, 2, 4, 8)
    text = repr(forecast([*few, replace(last, seconds=2 * last.seconds)]))
    assert "checked against 8: off by −50.0 %. As it is that far off, read the table as an order of mag" in text
    first, *rest = machine(1, 2, 4)
    text = repr(forecast([replace(first, seconds=30 * first.seconds), *rest]))
    assert "not checked. As what was measured on 1 rank is that far off, read the table" in text
    assert "order of magnitude" not in repr(forecast([*few, last]))


def test_faster_on_more_ranks_is_no_crash() -> None:
    faster = [MeasuredStep(ranks=ranks, seconds=1 / ranks, samples=ranks) for ranks in (1, 2, 4)]
    growth = fit(faster, ring(1e6))
    assert growth.compute > 0
    assert growth.latency == 0
    assert growth.bandwidth == math.inf
    assert "−" in repr(GrowthForecast.of(growth, 1e9)) or "+" in repr(GrowthForecast.of(growth, 1e9))


def test_the_table_in_text_and_html() -> None:
    found = forecast(machine(1, 2, 4, 8, cores=2), rate=1e9)
    lines = repr(found).splitlines()
    assert re.split(r"\s{2,}", lines[0])[:4] == ["ranks", "nodes", "a step", "at best"]
    assert [line.split()[:2] for line in lines[2:5]] == [["8", "1"], ["64", "8"], ["512", "64"]]
    assert re.search(r"^8 .* held back$", repr(found), re.M)
    assert "Fitted on 1, 2, 4 ranks, checked against 8: off by" in repr(found)
    html = found._repr_html_()
    assert html.count("<table") == 2
    assert html.count("<br>- ") > 4
    unknown = forecast([MeasuredStep(ranks=ranks, seconds=0.1 * ranks) for ranks in (1, 2)])
    assert "samples/s" not in repr(unknown)
