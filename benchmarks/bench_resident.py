"""What a cell costs that uses what ranks hold already: it reads a model, takes two steps on it, sends 512 MB home.

From the notebook's side, over an empty cell and over what the cell itself does on its ranks, which it tells.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.measure import Table, in_turns, kernel, run

START = """
import contextlib, io, time, torch
from torch import nn
torch.manual_seed(0)
def made(layers, width): return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
model, large = made(50, 64), made(500, 16)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
x, t = torch.randn(32, 64), torch.zeros(2**27)
copy = torch.empty_like(t)
def over(cell):
    "Milliseconds of a cell, and of what it does."
    text = f"import time\\nbegan = time.perf_counter()\\n{cell}\\ntook = time.perf_counter() - began"
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        get_ipython().run_cell_magic("distributed", "--devices 2 --monitor off", text)
    return 1e3 * (time.perf_counter() - start), 1e3 * took
def copied():
    start = time.perf_counter()
    copy.copy_(t)
    return 1e3 * (time.perf_counter() - start)
"""
STEPS = "for _ in range(2):\\n    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()"
READ = "with torch.no_grad(): y = sum(p.sum() for p in {}.parameters()).item()"


def main() -> None:
    table = Table("what ranks hold already, 2 ranks")
    with kernel("%load_ext nbtrain", START) as k:

        def over(cell: str) -> float:
            whole, inside = run(k, f"import json; print('measured:' + json.dumps(over('''{cell}''')))")
            return float(whole) - float(inside)

        for what, cell, goal in (
            ("reads a model of 100 tensors, over an empty cell", READ.format("model"), 2.0),
            ("reads a model of 1,000 tensors", READ.format("large"), 10.0),
            ("two AdamW steps on 100 tensors, over the steps", STEPS, 10.0),
        ):
            for _ in range(4):
                over(cell)
            empty, found = in_turns(25, partial(over, "pass"), partial(over, cell))
            control = f"an empty one in turns: {empty:.1f} ms"
            table.row(what, found - empty * (cell != STEPS), goal, "ms", control)
        for _ in range(3):
            over("t.add_(1)")
        home = statistics.median(over("t.add_(1)") for _ in range(7))
        one = statistics.median(run(k, "import json; print('measured:' + json.dumps(copied()))") for _ in range(7))
        table.row("512 MB home, by one copy of it", home / one, 1.5, "×", f"a copy: {one:.0f} ms")


if __name__ == "__main__":
    main()
