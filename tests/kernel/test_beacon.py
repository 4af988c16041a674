"""The kernel's record and socket as a real kernel has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kernels import Kernel


@pytest.mark.kernel
def test_in_a_kernel(kernel: Kernel) -> None:
    said = kernel.run("from nbtrain.watch.beacon import here\nprint(*here())").stdout.split()
    connection = Path(kernel.manager.connection_file)
    assert said == [connection.stem.removeprefix("kernel-"), str(connection.parent)]
