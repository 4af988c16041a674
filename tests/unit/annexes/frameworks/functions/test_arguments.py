"""Arguments of `nbtrain.run` and `nbtrain.predict`, as a line."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.annexes.frameworks.functions.arguments import NAME, line_of
from nbtrain.base.errors import UsageError
from nbtrain.strategies.ddp import DDP


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (("auto", "auto", "auto", None), ""),
        (("ddp", None, None, None), "--strategy ddp"),
        (("fsdp --wrap Block", 4, "gpu", "bf16-mixed"),
         "--strategy fsdp --wrap Block --accelerator gpu --devices 4 --precision bf16-mixed"),
        (("ddp", [1, 3], "cuda", None), "--strategy ddp --accelerator cuda --devices [1,3]"),
        (("ddp", range(2), "cpu", 32), "--strategy ddp --accelerator cpu --devices [0,1] --precision 32"),
        (("ddp", "1, 3", "auto", None), "--strategy ddp --devices [1,3]"),
        (("ddp", "free:2", "auto", None), "--strategy ddp --devices free:2"),
        (("ddp", -1, "auto", None), "--strategy ddp --devices -1"),
    ],
)  # fmt: skip
def test_what_is_given_is_a_line(given: tuple[Any, ...], line: str) -> None:
    assert line_of(*given) == (line, {})


def test_a_strategy_of_the_notebooks_is_named() -> None:
    mine = DDP()
    assert line_of(mine, 2, "auto", None) == (f"--strategy {NAME} --devices 2", {NAME: mine})


def test_what_is_no_strategy_and_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="strategy='fsdp --wrap Block'"):
        line_of(object(), 2, "auto", None)
    with pytest.raises(UsageError, match="devices=True: how many"):
        line_of("ddp", True, "auto", None)
