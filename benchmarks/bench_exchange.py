"""What the exchange costs: finding out that nothing changed, sending for the first time, sending again, coming home.

    python benchmarks/bench_exchange.py [megabytes]

Both sides are in this process, so that what is measured is the exchange and not the scheduler. Medians, beside
what the machine itself needs for the same bytes.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.measure import in_turns
from nbtrain.exchange.graph.find_changes import Walk, remember
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel
from nbtrain.exchange.kinds.base import learn_atoms
from nbtrain.exchange.kinds.bulk_compare import CHUNK
from nbtrain.exchange.kinds.checksum import lanes
from nbtrain.exchange.parcel import Opener, Packer, Parcel
from nbtrain.exchange.shared_memory import Segment

Namespace = dict[str, Any]


class Side:
    """A notebook or a rank."""

    def __init__(self, first_key: int, step: int, directory: str) -> None:
        self.namespace: Namespace = {"__name__": "__main__"}
        self.table = ObjectTable(first_key, step)
        self.packer = Packer(directory)
        self.opener = Opener()

    def walk(self, names: list[str]) -> Walk:
        walk = Walk(self.table, self.namespace, keep_home=self.table.step < 0)
        for name in names:
            walk.name(name, self.namespace[name])
        walk.finish()
        return walk

    def pack(self, walk: Walk) -> Parcel:
        return self.packer.pack(walk.content, (0,))

    def open(self, parcel: Parcel) -> None:
        content, buffers = self.opener.open(parcel)
        arrival = OpenedParcel(self.table, self.namespace, content, buffers, renew=self.opener.renew)
        remember(self.table, self.namespace, arrival.commit())
        self.namespace.update(arrival.names)


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = act()
    return (time.perf_counter() - start) * 1e3, result


def median(act: Callable[[], Any], times: int = 15) -> float:
    return statistics.median(timed(act)[0] for _ in range(times))


def row(what: str, value: float, beside: str = "") -> None:
    print(f"{what:<58}{value:>9.1f} ms   {beside}")


def small_model() -> Namespace:
    """300 tensors, one million parameters, with the state of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(81, 81) for _ in range(150)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 81)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def many_tensors(directory: str) -> None:
    first, opened = [], []
    for _ in range(5):
        notebook, rank = Side(0, 1, directory), Side(-1, -1, directory)
        notebook.namespace.update(small_model())
        names = ["model", "optimizer"]
        spent, walk = timed(lambda: notebook.walk(names))  # noqa: B023
        packing, parcel = timed(lambda: notebook.pack(walk))  # noqa: B023
        first.append((spent, packing))
        opened.append(timed(lambda: rank.open(parcel))[0])  # noqa: B023
    notebook.walk(names)
    row("1200 tensors: nothing changed, notebook", median(lambda: notebook.walk(names)), "goal 4")
    rank.walk(names)
    row("1200 tensors: nothing changed, rank", median(lambda: rank.walk(names)), "goal 4")
    row("1200 tensors: first walk", statistics.median(s for s, _ in first), "goal 25")
    row("1200 tensors: packed", statistics.median(p for _, p in first))
    row("1200 tensors: opened on a rank", statistics.median(opened), "goal 25")

    def train() -> None:
        with torch.no_grad():
            for p in rank.namespace["model"].parameters():
                p.add_(0.001)

    times = []
    for _ in range(7):
        train()
        times.append(timed(lambda: notebook.open(rank.pack(rank.walk(names))))[0])
    row("300 tensors changed: home", statistics.median(times))


def all_but_the_bytes(directory: str) -> None:
    """What a look at a model costs beside the summing up of its tensors' bytes, which no bookkeeping can save."""
    notebook = Side(0, 1, directory)
    notebook.namespace.update(model=small_model()["model"])
    for _ in range(3):
        notebook.walk(["model"])
    flats = [p.detach().reshape(-1).view(torch.uint8) for p in notebook.namespace["model"].parameters()]
    room = torch.empty(4 * CHUNK, dtype=torch.uint8)

    groups: list[list[torch.Tensor]] = [[]]
    for flat in flats:
        groups[-1].append(flat)
        if sum(map(len, groups[-1])) >= CHUNK:
            groups.append([])
    sizes = [sum(map(len, group)) for group in groups]

    def summed() -> None:
        for group, size in zip(groups, sizes, strict=True):
            torch.cat(group, out=room[:size])
            lanes(room.numpy()[:size])

    pairs = [(timed(lambda: notebook.walk(["model"]))[0], timed(summed)[0]) for _ in range(40)]
    whole, bytes_only = statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
    row("300 tensors: nothing changed", whole, f"their bytes alone {bytes_only:.2f}")
    row("300 tensors: everything but the bytes", statistics.median(a - b for a, b in pairs), "goal 1")


def containers(directory: str) -> None:
    """Unchanged, before each cell that reads them. The budget rule: all is looked at, and from 0.2 s on it is said."""
    words = [f"w{i}" for i in range(1_000_000)]
    for what, value in (
        ("list of 1,000,000 integers", list(range(1_000_000))),
        ("list of 1,000,000 strings", words),
        ("dict of 300,000 strings", {word: i for i, word in enumerate(words[:300_000])}),
        ("list of 100,000 lists of 10", [[i] * 10 for i in range(100_000)]),
        ("tuple of 1,000,000 integers", tuple(range(1_000_000))),
        ("string of 50 MB", "x" * 50_000_000),
    ):
        notebook = Side(0, 1, directory)
        notebook.namespace["value"] = value
        notebook.pack(notebook.walk(["value"]))
        looked, pickled = in_turns(
            7,
            lambda: timed(lambda: notebook.walk(["value"]))[0],  # noqa: B023
            lambda: timed(lambda: pickle.dumps(value, 5))[0],  # noqa: B023
        )
        row(f"{what}: nothing changed", looked, f"pickling it {pickled:.1f}")


def one_copy(size: int) -> tuple[float, float]:
    """Milliseconds for the bytes into a fresh memfd, and into touched memory."""
    data = torch.zeros(size, dtype=torch.uint8)
    data.add_(1)
    into = torch.zeros_like(data)
    into.add_(1)
    fresh = []
    for _ in range(3):
        segment = Segment(0, size, tempfile.gettempdir())
        fresh.append(timed(lambda: segment.write([(0, memoryview(data.numpy()))]))[0])  # noqa: B023
        segment.close()
    return statistics.median(fresh), median(lambda: into.copy_(data), 7)


def large(directory: str, megabytes: int) -> None:
    fresh, touched = one_copy(megabytes << 20)
    row(f"{megabytes} MB: written to fresh memory", fresh, "the machine")
    row(f"{megabytes} MB: copied into touched memory", touched, "the machine")
    notebook, rank = Side(0, 1, directory), Side(-1, -1, directory)
    weights = notebook.namespace["weights"] = torch.zeros(megabytes << 18)
    weights.add_(1)

    def out() -> None:
        rank.open(notebook.pack(notebook.walk(["weights"])))

    spent, _ = timed(out)
    row(f"{megabytes} MB: out for the first time", spent, f"{spent / fresh:.2f} × fresh; goal 1.2")
    spent = median(out, 7)
    row(f"{megabytes} MB: nothing changed", spent, f"{spent * 400 / megabytes:.0f} per 400 MB; goal 30")

    times = []
    for _ in range(5):
        weights.add_(1)
        times.append(timed(out)[0])
    value = statistics.median(times)
    row(f"{megabytes} MB: changed, out again", value, f"{value / touched:.2f} × copy; goal 3")
    times = []
    for _ in range(6):
        rank.namespace["weights"].add_(1)
        times.append(timed(lambda: notebook.open(rank.pack(rank.walk(["weights"]))))[0])
        rank.packer.released(0, notebook.opener.released())
    row(f"{megabytes} MB: home for the first time", times[0])
    value = statistics.median(times[1:])
    row(f"{megabytes} MB: home again", value, f"{value / touched:.2f} × copy; goal 3")
    assert torch.equal(weights, rank.namespace["weights"])


def main() -> None:
    learn_atoms()
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    with tempfile.TemporaryDirectory() as directory:
        all_but_the_bytes(directory)
        many_tensors(directory)
        containers(directory)
        large(directory, megabytes)


if __name__ == "__main__":
    main()
