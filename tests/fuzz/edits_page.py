"""docs/edits.md: a table of edits and strategies, and below it each sentence once, with a number."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.fuzz.common_edits import STRATEGIES, TABLE, WITH
from tests.fuzz.player import ROOT

PAGE = ROOT / "docs" / "edits.md"
Entries = dict[str, dict[str, str]]
"""edit → strategy → `right`, or the sentence, after WITH where the line that it names is right"""

HEAD = """\
# What you edit around a step, and what each strategy makes of it

Written by `.ci/edits`, which plays each line in two cells on two CPU ranks and compares weights, the optimizer's state
and what the cell collected with one process that sees the same batches. ✓ is: equal but for rounding. A number is the
sentence with which the cell is refused, below the table; `whole` beside it: the sentence names a line,
`with whole(…): …`, which was played as well, and equals one process. The programs are in
`tests/fuzz/common_edits.py`, and more of such lines in `tests/fuzz/whole_edits.py`.

No block helps where a strategy cannot do it at all, and its sentence names another one: gradients of gradients, and
under stage 3 a second backward through one forward; under `deepspeed` two optimizers for one model, and weights in
double precision or complex; under `pipeline` a forward that cannot be cut into stages, and gradients that the loop
makes itself (`torch.autograd.grad` over parameters).
"""


def page(entries: Mapping[str, Mapping[str, str]]) -> str:
    numbers: dict[str, int] = {}

    def cell(text: str) -> str:
        if not text or text == "right":
            return "✓" if text else ""
        number = numbers.setdefault(text.removeprefix(WITH), len(numbers) + 1)
        return f"`whole` {number}" if text.startswith(WITH) else str(number)

    lines = ["| | " + " | ".join(STRATEGIES) + " |", "|---|" + "---|" * len(STRATEGIES)]
    for edit in TABLE:
        found = entries.get(edit.words, {})
        lines.append(f"| {edit.words} | " + " | ".join(cell(found.get(name, "")) for name in STRATEGIES) + " |")
    sentences = [f"{number}. {text}" for text, number in numbers.items()]
    return "\n".join([HEAD, *lines, "", *sentences]) + "\n"


def read(text: str) -> Entries:
    """What `page` was made of."""
    sentences = dict(re.findall(r"(?m)^(\d+)\. (.*)$", text))
    found: Entries = {}

    def entry(cell: str) -> str:
        mark, _, number = cell.rpartition(" ")
        return "right" if cell == "✓" else (WITH if mark else "") + sentences[number]

    for row in re.findall(r"(?m)^\| (.+?) \|((?: (?:`whole` )?[✓\d]* ?\|)+)$", text):
        cells = [one.strip() for one in row[1].split("|")][: len(STRATEGIES)]
        found[row[0]] = {name: entry(one) for name, one in zip(STRATEGIES, cells, strict=True) if one}
    return found
