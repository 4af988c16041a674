"""What several machines cost beside one: a cell's way there and back, large tensors, and what is lost with a machine.

Machines are nodes on this one; where the line matters, two hosts of their own whose network is limited.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from socket import create_connection
from typing import Any

from benchmarks.measure import Table, in_turns, kernel, run, say, seconds
from tests.support.kernels import Kernel
from tests.support.machines import RUN, Machines, notebook_with_machines
from tests.support.networks import two_hosts, why_no_limit, why_not

EMPTY = "-s none --monitor off\npass"
LOCAL = f"%%distributed --devices 2 {EMPTY}"
REMOTE = f"%%distributed --engine elastic --nodes 2 --devices 1 {EMPTY}"
FOUR = "%%distributed --devices 4 --monitor off"
TWO = "%%distributed --engine elastic --nodes 2 --devices 2 --monitor off"
SIZE = 512 << 20
MBIT = 1000
SETUP = """
import os, time, torch
from torch import nn
from nbtrain.engines.remote.lobby import lobby
def sent(): return sum(one.frames.bytes_sent for one in lobby().machines("join"))
"""
MODEL = "model = nn.Linear(8, 8); opt = torch.optim.SGD(model.parameters(), 1e-3)"
LOOP = "    model(torch.randn(4, 8)).sum().backward(); opt.step(); opt.zero_grad()\n"
TRAIN = f"{TWO} -s ddp\nfor n in range(10):\n{LOOP}"
DIES = f"""{TWO} -s ddp
for n in range(10**6):
{LOOP}    if n == 5 and rank == 2:
        open(died, "w").write(str(time.time()))
        os.kill(os.getpid(), 9)
"""
GOES_ON = f"{TWO} -s ddp\nfor n in range(10**6):\n{LOOP}    if n == 5: print('going')"

SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    room = bytearray(1 << 20)
    while True:
        peer, _ = server.accept()
        with peer:
            left = int(sys.argv[2])
            while left:
                left -= peer.recv_into(room, min(left, len(room)))
            peer.sendall(b".")
"""
"""receives so many bytes and says that it has them"""


def main() -> None:
    table = Table("several machines")
    empty_cells(table)
    with notebook_with_machines() as (notebook, machines), sinks([("127.0.0.1", RUN)] * 2) as plain:
        run(notebook.kernel, SETUP)
        tensors(table, notebook.kernel, plain, "on loopback", 1.25)
        recovery(table, notebook.kernel, machines)
    with notebook_with_machines(apart="0") as (notebook, _):
        run(notebook.kernel, SETUP)
        beside(table, notebook.kernel)
    if reason := why_not() or why_no_limit():
        print(f"    no hosts with a limited network: {reason}")
        return
    with two_hosts() as hosts, notebook_with_machines(0) as (notebook, machines):
        for host in hosts:
            machines.add(host.run)
            host.limit(MBIT)
        run(notebook.kernel, SETUP)
        with sinks([(host.address, host.run) for host in hosts]) as plain:
            tensors(table, notebook.kernel, plain, f"to hosts at {MBIT} Mbit/s", 1.25)


def empty_cells(table: Table) -> None:
    with kernel("%load_ext nbtrain") as here, notebook_with_machines() as (notebook, _):
        there = notebook.kernel
        for _ in range(5):
            seconds(here, LOCAL)
            seconds(there, REMOTE)
        local, remote = in_turns(101, partial(seconds, here, LOCAL), partial(seconds, there, REMOTE))
        table.row(
            "an empty warm cell on 2 machines × 1 rank, over one on 2 ranks here", 1e3 * (remote - local), 5.0, "ms",
            f"2 ranks here: {1e3 * local:.1f} ms",
        )  # fmt: skip


def tensors(table: Table, k: Kernel, plain: Callable[[], float], where: str, goal: float) -> None:
    """`goal`: times the plain socket's. What ranks here wait for as well, packing above all, is not the network's."""
    crossed: list[int] = []

    def once(k: Kernel, line: str) -> float:
        number = float(len(crossed))
        run(k, f"big = torch.full(({SIZE // 4},), {number}); before = sent()")
        took = seconds(k, f"{line}\nassert big[-1] == {number}")
        crossed.append(run(k, say("sent() - before")))
        return took

    with kernel("%load_ext nbtrain", SETUP) as here:
        for one, line in ((here, FOUR), (k, TWO)):
            run(one, f"{line}\npass")
            once(one, line)
        ours, local, theirs = in_turns(5, partial(once, k, TWO), partial(once, here, FOUR), plain)
    control = f"{ours:.2f} s, 4 ranks here {local:.2f} s, a plain socket for each of 2 machines {theirs:.2f} s"
    table.row(f"512 MB to 2 machines × 2 ranks {where}, by a plain socket", (ours - local) / theirs, goal, "×", control)
    table.row(f"what of it crossed {where}, by 512 MB", max(crossed) / SIZE, 2.001, "×")
    run(k, "del big")


def beside(table: Table, k: Kernel) -> None:
    """Nodes on the notebook's machine, as where Jupyter runs inside of an allocation."""
    number = 0.0

    def once(k: Kernel, line: str) -> float:
        nonlocal number
        number += 1
        run(k, f"big = torch.full(({SIZE // 4},), {number})")
        return seconds(k, f"{line}\nassert big[-1] == {number}")

    with kernel("%load_ext nbtrain", SETUP) as here:
        for one, line in ((here, FOUR), (k, TWO)):
            run(one, f"{line}\npass")
            once(one, line)
        there, local = in_turns(5, partial(once, k, TWO), partial(once, here, FOUR))
    table.row(
        "512 MB to 2 nodes × 2 ranks on the notebook's machine, by 4 ranks of its own", there / local, 1.25, "×",
        f"4 ranks here: {local:.2f} s",
    )  # fmt: skip
    run(k, "del big")


@contextmanager
def sinks(where: Sequence[tuple[str, Callable[..., subprocess.Popen[Any]]]]) -> Iterator[Callable[[], float]]:
    """Seconds that plain sockets need for SIZE bytes to each of these places, all at once."""
    started = [
        (address, start([sys.executable, "-c", SINK, address, str(SIZE)], stdout=subprocess.PIPE))
        for address, start in where
    ]
    ports = [(address, int(process.stdout.readline())) for address, process in started if process.stdout is not None]
    content = memoryview(bytearray(SIZE))

    def send(place: tuple[str, int]) -> None:
        with create_connection(place) as peer:
            peer.sendall(content)
            peer.recv(1)

    def once() -> float:
        threads = [threading.Thread(target=send, args=(place,)) for place in ports]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    try:
        yield once
    finally:
        for _, process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def recovery(table: Table, k: Kernel, machines: Machines) -> None:
    died = machines.folder / "died"
    run(k, f"{MODEL}; died = {str(died)!r}")
    run(k, TRAIN)

    def rank_dies() -> tuple[float, float]:
        """Seconds to the error, and from there to the end of the next cell."""
        failed = k.run(DIES, 120)
        over = time.time()
        assert failed.error is not None, failed.text
        return over - float(died.read_text()), seconds(k, TRAIN)

    def node_dies() -> tuple[float, float]:
        machines.add()
        k.wait_for(lambda: machines.joined() == 3, 60)
        used = run(k, say("lobby().machines('join')[1].machine.pid"))
        cell = k.start(GOES_ON)
        k.wait_for(lambda: "going" in cell.stdout)
        began = time.perf_counter()
        os.kill(used, signal.SIGKILL)
        k.wait(cell, 120)
        to_error = time.perf_counter() - began
        assert cell.error is not None, cell.text
        return to_error, seconds(k, TRAIN)

    for what, dies, goal, whole in (
        ("a rank is killed: from the cell's error to the end of the next", rank_dies, 2.0, False),
        ("a node is killed, another is there: to the end of the next cell", node_dies, 5.0, True),
    ):
        rounds = sorted((dies() for _ in range(5)), key=sum)
        error, next_cell = rounds[2]
        control = f"the error after {error:.2f} s, the next cell {next_cell:.2f} s"
        table.row(what, error + next_cell if whole else next_cell, goal, "s", control)


if __name__ == "__main__":
    main()
