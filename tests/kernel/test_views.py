"""The figures of a run in a real kernel."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel

LOOP = """import time
for step in range(60):
    log(loss=1 / (step + 1))
    time.sleep(0.05)"""


@pytest.mark.kernel
def test_what_is_shown_and_replaced(kernel: Kernel) -> None:
    """In a kernel, where nobody answers: one output, and in the end a picture."""
    kernel.run("%load_ext nbtrain")
    for monitor, times in (("widget", 1), ("html", 2)):
        shown = kernel.run(f"%%distributed -d 2 -s none --monitor {monitor}\n{LOOP}")
        assert shown.error is None
        (last,) = shown.displays
        assert len(shown.updates) >= times
        assert shown.updates[-1] == last
        assert last.keys() == {"text/html", "text/plain"}
        assert 'src="data:image/svg+xml;base64,' in last["text/html"]
        assert last["text/plain"].startswith("none · 2 ranks · cpu\ndone · 0:0")
