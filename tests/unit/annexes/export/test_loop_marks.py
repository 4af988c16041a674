"""Which loops of a script say whether they train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbtrain.annexes.export.loop_marks import marked, that_train

DEALT = [
    "for x, y in {loader}:\n    loss.backward()", "for i, b in enumerate(tqdm({loader})):\n    o.step()",
    "for x in {loader}: step_on(x)", "for e in range(2):\n    for x in {loader}:\n        o.step()\n    s.step()",
    "def run(data, epochs):\n    for e in range(epochs):\n        for x in {data}: o.step()",
    "for x in {self.data}: o.step()", "for a, b in zip({loader}, {other.data}): o.step()",
    "with torch.no_grad():\n    for x in {loader}: n += g(x)\nn = reduce(n, 'sum')",
    "@torch.no_grad()\ndef f(data):\n    n = sum(g(x) for x in {data})\n    dist.all_reduce(n)",
]  # fmt: skip
EVALUATE = ["for x in {loader}:\n    with torch.no_grad():\n        g(x)"]
AS_THEY_ARE = [
    "for x in loader:\n    total += f(x)", "with torch.no_grad():\n    a = sum(f(x) for x in loader)",
    "def run(data, train):\n    for x in data:\n        if train:\n            o.step()", "for e in range(n): o.step()",
    "for x in X: o.step()", "for x in DataLoader(d): o.step()", "for e in range(len(loader)): o.step()",
]  # fmt: skip


@pytest.mark.parametrize("text", [*DEALT, *EVALUATE, *AS_THEY_ARE])
def test_loops_of_a_script(text: str) -> None:
    namespace: dict[str, Any] = {"loader": DataLoader([1]), "X": torch.ones(9), "n": 3}
    train = that_train(["def step_on(x): o.step()"])
    before, after = ("_dealt(", ", False)") if text in EVALUATE else ("_dealt(", ")")
    written = text.replace("{", "").replace("}", "")
    assert marked(written, namespace, train) == text.replace("{", before).replace("}", after)
