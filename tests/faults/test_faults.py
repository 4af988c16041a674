"""After every fault of the catalogue: notebook all before or all after, the next cell works, nothing is left behind.

`make verify` plays a sample: each fault once, under a strategy that SEED draws (default 0). It starts its ranks in one
way, which is drawn too.
`make faults` plays all of them under all combinations (FAULTS=all).
"""

from __future__ import annotations

import os
import random
import time

import pytest

from tests.faults.catalogue import FAULTS, Fault
from tests.faults.scene import COMBINATIONS, SETTLES, Combination, Scene, one_of_each
from tests.support.kernels import Result

SEED = int(os.environ.get("SEED", "0"))
pytestmark = [pytest.mark.kernel, pytest.mark.limit(120)]


def drawn() -> list[tuple[Combination, Fault]]:
    """What is played, in the order in which kernels are had, one for each combination; and in that of the catalogue,
    where nothing follows upon what would harm it."""
    everything = os.environ.get("FAULTS") == "all"
    if everything:
        played = [(one, fault) for fault in FAULTS for one in COMBINATIONS if fault.fits(one)]
    else:
        played = evenly(random.Random(SEED))
    return sorted(played, key=lambda one: (COMBINATIONS.index(one[0]), FAULTS.index(one[1])))


def evenly(draw: random.Random) -> list[tuple[Combination, Fault]]:
    """Each fault under one combination of those that have had the fewest, the particular ones first."""
    combinations = one_of_each(draw)
    had = dict.fromkeys(combinations, 0)
    fitting = {fault.name: [one for one in combinations if fault.fits(one)] for fault in FAULTS}
    found = []
    for fault in sorted(draw.sample(FAULTS, len(FAULTS)), key=lambda fault: len(fitting[fault.name])):
        if fitting[fault.name]:
            fewest = min(had[one] for one in fitting[fault.name])
            one = draw.choice([one for one in fitting[fault.name] if had[one] == fewest])
            had[one] += 1
            found.append((one, fault))
    return found


@pytest.mark.sample(first=4)
@pytest.mark.parametrize(
    ("open_scenes", "fault"), drawn(), indirect=["open_scenes"], scope="module",  # of both: a kernel serves many
    ids=lambda one: one.name.replace(" ", "-") if isinstance(one, Fault) else str(one),
)  # fmt: skip
def test_after(scene: Scene, fault: Fault) -> None:
    many = scene.combination.ranks > 1
    if fault.extra:
        scene.prepare(fault.extra)
    pids = [process.pid for process in scene.ranks()]
    if fault.no_ranks:
        scene.notebook("%distributed stop")
    result = play(scene, fault)
    error = result.error
    assert (error.ename if error else "") in fault.raises.split("|"), result.text[-3000:]
    for said in fault.shows + (fault.says if many else ()):
        assert said in result.text, result.text[-3000:]
    if fault.held is not None and many:
        assert ("%distributed recover" in result.text) == fault.held, result.text[-3000:]
    cell, said = fault.here
    assert said in scene.kernel.run(cell).text
    scene.check_after(result, fault.body, fault.options, leaves=fault.leaves)
    check_lives(pids, [process.pid for process in scene.ranks()], fault.dies)
    cell, said = fault.then
    assert said in scene.cell(cell).text
    if fault.leaves:
        check_ends(scene)


def play(scene: Scene, fault: Fault) -> Result:
    """The cell, and Stop at what it shows."""
    result = scene.begin(fault.body, fault.options)
    for when in fault.press:
        if isinstance(when, str):
            scene.kernel.wait_for(lambda when=when: when in result.text, fault.seconds)  # type: ignore[misc]
        else:
            time.sleep(when)  # where the cell can say nothing
        scene.stop()
    return scene.kernel.wait(result, fault.seconds)


def check_lives(before: list[int], after: list[int], dies: str) -> None:
    expected = {"": [], "first": [0], "last": [len(before) - 1], "all": [*range(len(before))]}.get(dies)
    if expected is not None:
        assert [i for i in range(len(before)) if before[i] != after[i]] == expected


def check_ends(scene: Scene) -> None:
    """What a cell has left running goes with the ranks."""
    began = time.monotonic()
    scene.notebook("%distributed stop", timeout=30)
    while left := [p for p in scene.census().people if p in ("rank", "other", "a rank's child")]:
        assert time.monotonic() - began < SETTLES, left
    scene.notebook(scene.head() + "pass")
