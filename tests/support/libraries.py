"""Libraries that some tests want and the tests' own environment does not have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.absent import absent
from tests.support.kernels import ROOT, Kernel, running_kernel

MADE = ROOT / "build" / "libraries"

OF_NOTEBOOKS = {"08_hugging_face": "hugging_face", "10_fine_tuning": "hugging_face"}
"""what a notebook needs beside the tests' own environment"""


def library(name: str) -> str:
    """The folder for PYTHONPATH; the test is left out where it is not there."""
    folder = MADE / name
    if not (folder / "made").is_file():
        absent(f"the libraries of {name} are not installed", "make environments")
    return str(folder)


@contextmanager
def kernel_with(*names: str, **environment: str) -> Iterator[Kernel]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), *map(library, names)]))
    with running_kernel(PYTHONPATH=path, **environment) as kernel:
        yield kernel
