"""What a strategy says that a rank will hold is what a rank is found to hold: within 10 % of parameters, gradients and
optimizer state, within 25 % of activations, and of the most there is at once.

Measured by the system on real ranks (tests/support/estimates.py), of each strategy that can be used here, with a
transformer, a convolutional net with residual connections and a perceptron. `make verify` measures every strategy with
one of them, which SEED draws, and `make parity` (PARITY=all) with all. `python -m tests.support.estimates` prints the
table.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest

from tests.support.estimates import ROWS, SIZES, WEIGHTS, Row, Scales, compared, scales

pytestmark = [
    pytest.mark.thorough,
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


def drawn() -> list[tuple[Row, str]]:
    """Each row with all models, or with one: as many rows with each of them."""
    rows = [row for row in ROWS if row.playable]
    if os.environ.get("PARITY") == "all":
        return [(row, kind) for kind in SIZES for row in rows]
    order = random.Random(os.environ.get("SEED", "0")).sample([*SIZES], len(SIZES))
    found = [(row, order[at % len(order)]) for at, row in enumerate(rows)]
    return sorted(found, key=lambda one: order.index(one[1]))


@pytest.mark.sample("ddp-mlp")
@pytest.mark.parametrize(("row", "kind"), drawn(), ids=str)
def test_a_rank_holds_what_its_strategy_has_said(weighing: Scales, row: Row, kind: str) -> None:
    found = compared(weighing, row, kind)
    assert abs(found.kept - 1) <= KEPT, found.said
    assert abs(found.activations - 1) <= ACTIVATIONS, found.said
    assert abs(found.peak - 1) <= PEAK, found.said


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "sharded"])
def test_where_weights_are_large_gradients_make_the_peak(weighing: Scales, strategy: str) -> None:
    row = Row(strategy)
    if not row.playable:
        pytest.skip(f"{strategy} cannot be used here")
    found = compared(weighing, row, "mlp", WEIGHTS)
    assert abs(found.kept - 1) <= KEPT, found.said
    assert abs(found.peak - 1) <= KEPT, found.said
