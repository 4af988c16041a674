"""Cells in a real kernel whose numbers are looked at, and that may hang."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cards import ON_CARDS
from tests.support.kernels import Kernel, Result, running_kernel
from tests.support.notebook import Notebook


def numbers(found: Any, at: str = "") -> dict[str, Any]:
    """All tensors and numbers below an object, by where they are. Sent to the kernel as text, too."""
    import torch

    if hasattr(found, "state_dict"):
        found = found.state_dict()
    if isinstance(found, torch.Tensor):
        return {at: found.detach().cpu().clone().double()}
    if isinstance(found, (int, float)):
        return {at: torch.tensor(float(found)).double()}
    if isinstance(found, dict):
        return {k: v for key in found for k, v in numbers(found[key], f"{at}.{key}").items()}
    if isinstance(found, (list, tuple)):
        return {k: v for i, part in enumerate(found) for k, v in numbers(part, f"{at}[{i}]").items()}
    return {}


class Ranks:
    """One kernel, and in it one pool; after a cell that hangs the kernel is told to stop, twice."""

    def __init__(self, kernel: Kernel, start: str) -> None:
        self.notebook = Notebook(kernel, start)
        self.notebook(inspect.getsource(numbers).replace(": Any", "").replace(" -> dict[str, Any]", ""))

    def cell(self, code: str, limit: float) -> Result:
        kernel = self.notebook.kernel
        result = kernel.start(code)
        try:
            return kernel.wait(result, limit)
        except TimeoutError:
            shown = result.text
            for _ in range(2):
                if not result.done:
                    kernel.interrupt()
                    with contextlib.suppress(TimeoutError):
                        kernel.wait(result, 10)
            pytest.fail(f"this hangs:\n{code}\n--- shown so far\n{shown}", pytrace=False)


@contextlib.contextmanager
def kernel_of(start: str) -> Iterator[Ranks]:
    """With a directory of its own for what a pool keeps there: it outlives a test, and is no leak of that test's."""
    own = {} if ON_CARDS else {"DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder, running_kernel(XDG_RUNTIME_DIR=folder, **own) as kernel:
        found = Ranks(kernel, start)
        yield found
        found.notebook("%distributed stop", timeout=60)
