"""An error of nbtrain's is shown down to the user's line."""

from __future__ import annotations

import json
import traceback
from functools import partial

import pytest

from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line.values import evaluate
from nbtrain.worker.shell.shell import down_to_user_line


def test_what_is_below_the_user_s_last_line_is_left_out() -> None:
    with pytest.raises(UsageError) as caught:
        json.loads("NaN", parse_constant=partial(evaluate, notebook={}))
    whole = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in whole][1:] == ["loads", "decode", "raw_decode", "evaluate", "_build"]
    shown = traceback.extract_tb(down_to_user_line(caught.value.__traceback__))
    assert [frame.name for frame in shown] == ["test_what_is_below_the_user_s_last_line_is_left_out"]
