"""What a warm cell on several machines costs the kernel is counted, not timed: messages grow with the machines alone,
and bytes and Python calls by so much for each machine and each rank. Ranks are stubs, which answer at once.
"""

from __future__ import annotations

import json

import pytest

from tests.support.kernels import Kernel
from tests.support.stub_nodes import stub_machines

pytestmark = pytest.mark.thorough

EACH_WAY = 2
"""messages to a machine, and from it, at most and whatever its ranks: the cell, and what ranks have written (of which
a busy machine is told less often); that, and how their cells ended"""
CALLS, PER_MACHINE, PER_RANK = 1_100, 60, 60
"""calls in the kernel's main thread; 6,300 on two ranks while the versions of packages were read for each cell"""
SENT, SENT_OF_RANK = 1_000, 40
"""bytes to a machine, whatever ranks there are, and for each rank of all machines: what it has written on the board"""
CAME, CAME_OF_RANK = 400, 100
"""bytes from a machine, and for each of its own ranks"""

COUNT = """
import collections, json, sys, time
from nbtrain.engines.remote.lobby import lobby
from nbtrain.engines.remote.numbered_frames import NumberedFrames
from nbtrain.engines.remote.pool import RemotePool
seen = collections.Counter()
def count(frame, event, arg):
    seen["calls"] += event == "call"
def counted(cls, name):
    plain = getattr(cls, name)
    def counting(*args):
        seen[name] += 1
        return plain(*args)
    setattr(cls, name, counting)
counted(NumberedFrames, "send"), counted(RemotePool, "hear")
def sizes():
    frames = [peer.frames for peer in lobby().machines()]
    return sum(one.bytes_sent for one in frames), sum(one.bytes_received for one in frames)
def per_cell(line):
    each = []
    for _ in range(10):
        time.sleep(0.1)  # the machines are told at most so often what ranks have written
        seen.clear()
        before = sizes()
        sys.setprofile(count)
        try:
            get_ipython().run_cell_magic("distributed", line, "pass")
        finally:
            sys.setprofile(None)
        time.sleep(0.1)
        found = [new - old for new, old in zip(sizes(), before)]
        each.append([seen["send"], seen["hear"], *found, seen["calls"]])
    print("counted:", json.dumps([min(one) for one in zip(*each)]))
"""


@pytest.mark.ranks
def test_what_a_cell_costs_the_kernel_grows_with_the_machines(shared_kernel: Kernel) -> None:
    assert shared_kernel.run("%load_ext nbtrain").error is None
    assert shared_kernel.run(COUNT).error is None
    with stub_machines(shared_kernel, 8):
        for nodes, each in ((4, 2), (4, 16), (8, 2), (8, 16)):
            ranks, line = nodes * each, f"--engine elastic --nodes {nodes} --devices {each} --monitor off -s none"
            for _ in range(3):
                assert shared_kernel.run(f"%%distributed {line}\npass").error is None
            said = shared_kernel.run(f"per_cell({line!r})")
            assert said.error is None, said.text
            told, heard, there, back, calls = json.loads(said.stdout.rpartition("counted:")[2])
            where = f"{nodes} machines × {each} ranks: {said.stdout}"
            assert max(told, heard) <= EACH_WAY * nodes, where
            assert there <= nodes * (SENT + SENT_OF_RANK * ranks), where
            assert back <= CAME * nodes + CAME_OF_RANK * ranks, where
            assert calls <= CALLS + PER_MACHINE * nodes + PER_RANK * ranks, where
        shared_kernel.run("%distributed stop")
