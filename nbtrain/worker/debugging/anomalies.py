"""`--detect-anomaly`: torch names the line of the forward whose backward computed NaN; a cell's line, in short."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbtrain.compat.intercept import listening

BEGINS = "Traceback of forward call that caused the error:"
CALL = re.compile(r'  File "([^"]*)", line (\d+), in (.*)\n(?:    (.*)\n)?')


@contextmanager
def detected_anomalies(names: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Inside, a backward that computes NaN is an error. `names`: file names of cells → their numbers."""
    import torch

    def make(show: Any) -> Any:
        def showing(message: Any, *args: Any, **kwargs: Any) -> None:
            if BEGINS in str(message):
                print(in_short(str(message), names()), file=sys.stderr)
            else:
                show(message, *args, **kwargs)

        return showing

    with listening("warnings.showwarning", "anomalies", make), torch.autograd.set_detect_anomaly(True):
        yield


def in_short(text: str, names: Mapping[str, int]) -> str:
    """Of the calls that torch has noted, those from the cell on."""
    head, _, trace = text.partition(BEGINS)
    calls = CALL.findall(trace)
    first = next((at for at, (file, *_) in enumerate(calls) if file in names), 0)
    lines = [f"{head}{BEGINS}"]
    for file, line, function, source in calls[first:]:
        place = f"Cell In[{names[file]}]" if file in names else f'File "{file}"'
        lines += [f"  {place}, line {line}, in {function}", *([f"    {source}"] if source else [])]
    return "\n".join(lines)
