"""What a test needs and the machine does not have: left out by name on a laptop, a failure on CI."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def absent(what: str, remedy: str) -> NoReturn:
    """Leave the test out, saying how to get what is missing; fail where everything should be installed."""
    if os.environ.get("NBTRAIN_REQUIRE_ALL") == "1":
        pytest.fail(f"{what}, and NBTRAIN_REQUIRE_ALL=1 says that it should be here: {remedy}", pytrace=False)
    pytest.skip(f"{what} ({remedy})")
