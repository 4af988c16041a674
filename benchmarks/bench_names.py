"""What it costs to find out which names a cell needs: at first, when it is run again, and when one helper changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Table, in_turns
from nbtrain.exchange.names import code_globals
from nbtrain.exchange.names.cell_names import analyse, reach

HELPERS = 50
BLOCK = """for x{0}, y{0} in loader:
    loss{0} = helper{1}(model(x{0}), y{0}) * scale[{0}]
    loss{0}.backward(); opt.step(); opt.zero_grad()
    if loss{0}.item() > best: best = loss{0}.item()
    history.append((loss{0}.item(), f'{{x{0}.shape}} {{best}}'))
values{0} = [helper{2}(v) for v in range(3) if v]
with torch.no_grad():
    acc{0} = helper{3}(model).sum() / len(loader)
"""
HELPER = """def helper{0}(a, b=None, *, k=1):
    def inner(q): return q * g{0} + k
    t = [inner(z) for z in range(3)]
    return model(a) + g{0} if b is None else helper{1}(a) + torch.tensor(t)
"""


def milliseconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began)


def notebook() -> dict[str, Any]:
    layers = [torch.nn.Linear(3, 3) for _ in range(150)]
    namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch, "model": torch.nn.Sequential(*layers)}
    namespace.update(opt=torch.optim.AdamW(namespace["model"].parameters()), loader=[], scale=[], history=[], best=0)
    exec("\n".join(HELPER.format(i, (i + 1) % HELPERS) + f"g{i} = {i}" for i in range(HELPERS)), namespace)
    return namespace


def main() -> None:
    table = Table("names of a cell")
    namespace = notebook()
    text = "".join(BLOCK.format(i, *((i + k) % HELPERS for k in range(3))) for i in range(25))
    defining = "\n".join(HELPER.format(i, (i + 1) % HELPERS) for i in range(HELPERS))

    def first(source: str = text) -> None:
        analyse.cache_clear()
        code_globals._KNOWN.clear()
        reach(analyse(source), namespace)

    def again() -> None:
        reach(analyse(text), namespace)

    ours, bare, repeated, made = in_turns(
        30,
        lambda: milliseconds(first),
        lambda: milliseconds(lambda: compile(text, "<cell>", "exec")),
        lambda: milliseconds(again),
        lambda: milliseconds(lambda: first(defining)),
    )
    lines = text.count("\n")
    table.row(f"{lines} lines that use {HELPERS} helpers and 300 tensors", ours, 5, "ms", f"compiling it {bare:.1f} ms")
    table.row("the same cell again", repeated, 1, "ms")
    table.row(f"{HELPERS} helpers defined in the cell", made, 10, "ms")


if __name__ == "__main__":
    main()
