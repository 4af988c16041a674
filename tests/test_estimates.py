"""What a strategy says that a rank will hold is what a rank is found to hold: within 10 % of parameters, gradients and
optimizer state, within 25 % of activations, and of the most there is at once.

Measured by the system on real ranks (tests/estimates.py), of each strategy that can be used here, with a transformer, a
convolutional net with residual connections and a perceptron. `python -m tests.estimates` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.estimates import ROWS, SIZES, WEIGHTS, Row, Scales, compared, scales

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.limit(240),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a rank holds is read from /proc"),
]

KEPT = 0.10
ACTIVATIONS = 0.25
PEAK = 0.25


@pytest.fixture(scope="module")
def weighing() -> Iterator[Scales]:
    with scales() as found:
        yield found


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("row", [row for row in ROWS if row.playable], ids=str)
def test_a_rank_holds_what_its_strategy_has_said(weighing: Scales, row: Row, kind: str) -> None:
    found = compared(weighing, row, kind)
    assert abs(found.kept - 1) <= KEPT, found.said
    assert abs(found.activations - 1) <= ACTIVATIONS, found.said
    assert abs(found.peak - 1) <= PEAK, found.said


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "sharded"])
def test_where_weights_are_large_gradients_make_the_peak(weighing: Scales, strategy: str) -> None:
    row = Row(strategy)
    if not row.playable:
        pytest.skip(f"{strategy} cannot be used here")
    found = compared(weighing, row, "mlp", WEIGHTS)
    assert abs(found.kept - 1) <= KEPT, found.said
    assert abs(found.peak - 1) <= KEPT, found.said
