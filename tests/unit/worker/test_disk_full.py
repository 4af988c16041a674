"""A disk without room is told as that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from nbtrain.worker.checkpoints.folder import telling_of_a_full_disk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = sys.argv[1] + "/model.pt"
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # as a quota has it
what = torch.zeros(1 << 17)
try:
    with telling_of_a_full_disk(path):
        {write}
except OSError as error:
    print(error)
"""

WRITERS = {
    "torch.save": "torch.save(what, path)",
    "torch.save to a stream": "torch.save(what, open(path, 'wb'))",
    "bytes": "Path(path).write_bytes(what.numpy().tobytes())",
}


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS)
def test_no_room_is_told_as_that(tmp_path: Path, write: str) -> None:
    code = LIMITED.replace("{write}", WRITERS[write])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "there is no room for it (" in done.stdout, done.stderr
    assert "are left on this disk): make room, or write somewhere else: " in done.stdout
    assert str(tmp_path / "model.pt") in done.stdout


def test_another_error_stays_what_it_is() -> None:
    from nbtrain.worker.checkpoints.folder import telling_of_a_full_disk

    with pytest.raises(RuntimeError, match="storage has wrong byte size"), telling_of_a_full_disk("x"):
        raise RuntimeError("storage has wrong byte size")
