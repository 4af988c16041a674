"""What a rank keeps of cells' texts: those of late, and those in which something lives."""

from __future__ import annotations

import linecache

from nbtrain.base.messages import LATELY, CellSource
from nbtrain.worker.shell.shell import CellSources


def test_texts_of_old_cells_go_unless_a_function_lives() -> None:
    numbers: dict[str, int] = {}
    texts = CellSources(numbers)
    namespace: dict[str, object] = {}
    name = "<texts {}>".format

    def cell(at: int) -> CellSource:
        return CellSource(filename=name(at), text=f"def f{at}():\n    return {at}\n", number=at)

    exec(compile(cell(0).text, name(0), "exec"), namespace)
    for at in range(5 * LATELY):
        texts.learn([cell(at), cell(1)])  # the second is run again and again
    known = [key for key in linecache.cache if key.startswith("<texts")]
    assert set(known) == numbers.keys()
    assert len(known) <= 2 * LATELY
    assert linecache.getline(name(0), 2) == "    return 0\n", "its function lives"
    assert {name(1), *(name(at) for at in range(4 * LATELY + 1, 5 * LATELY))} <= numbers.keys()
    for key in known:
        del linecache.cache[key]
