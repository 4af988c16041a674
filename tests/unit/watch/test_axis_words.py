"""Words beside an axis of the saved picture are short enough not to be cut, and say the same number."""

from __future__ import annotations

import pytest

from nbtrain.watch.svg.base import NARROW, narrow


@pytest.mark.parametrize(
    "value", [0.0, 1.0, -0.5, 2.34, 123456.0, 3.14159e13, -3.14159e13, 8.07e-5, -8.07e-5, 1.2e100, -9.99e-300, 99999.5]
)
def test_a_number_fits_and_is_right_to_its_digits(value: float) -> None:
    said = narrow("{:.3g}".format)(value)
    assert len(said) <= NARROW
    assert "+" not in said
    assert float(said) == pytest.approx(value, rel=0.06)


def test_words_that_fit_stay() -> None:
    assert narrow("{:.3g}".format)(0.0123) == "0.0123"
    assert narrow("{:.3g}".format)(8.07e-5) == "8.07e-5"
