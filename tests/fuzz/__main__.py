"""`python -m tests.fuzz --strategy fsdp --examples 1000 --seed 0`: random training programs on warm ranks.

Says how many were right, refused (by sentence) and wrong; each kind of failure is made small and kept as a notebook's
text below build/fuzz. `--number 17` plays one program and shows all of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.common_edits import LINE
from tests.fuzz.player import ROOT, Player
from tests.fuzz.training import Program, draw
from tests.fuzz.verdicts import Oracle, Verdict, judge, shrunk

STRATEGIES = (
    "ddp", "zero1", "sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "pipeline", "dp",
    "horovod",
)  # fmt: skip
NOT_ALIKE = dict.fromkeys(("pipeline", "dp", "ddp2"), ("BatchNorm", "SyncBatchNorm"))
"""Models whose statistics are told, in the docs of a strategy, to be those of parts of a batch."""

UNMENDED: dict[str, frozenset[str]] = {}
"""Edits, loops and architectures of which it is known that they are wrong under a strategy ("*": under all), so that a
sample of each day finds what is new. `make fuzz` plays them."""


def suited(program: Program, strategy: str) -> Program:
    """With another model, where that one's numbers are not meant to be those of one process."""
    if program.architecture in NOT_ALIKE.get(strategy, ()):
        return program.of("layers") or program
    return program


def left_out(program: Program, strategy: str) -> bool:
    unmended = UNMENDED.get(strategy, frozenset()) | UNMENDED.get("*", frozenset())
    there = {edit.edit for cell in program.cells for edit in cell.edits} | {cell.loop for cell in program.cells}
    return bool(unmended & {*there, program.architecture})


class Round:
    """All programs of one strategy."""

    def __init__(self, strategy: str, seed: int, folder: Path, shrink: bool) -> None:
        self.strategy, self.seed, self.folder, self.shrink = strategy, seed, folder, shrink
        self.oracle, self.ranks = Oracle(), Player(strategy)
        self.oracle.__enter__()
        self.words: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: dict[str, list[int]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        self.ranks.close()
        self.oracle.__exit__()

    def verdict(self, program: Program, ranks: Player) -> Verdict:
        alone, nudged = self.oracle.play(program)
        return judge(alone, nudged, ranks.play(program.text))

    def play(self, number: int) -> Verdict:
        program = suited(draw(self.seed, number), self.strategy)
        found = self.verdict(program, self.ranks)
        self.words[found.word] += 1
        if found.word == "refused":
            self.refusals[found.kind] += 1
            if LINE in found.why:
                program = program.with_whole()
                found = self.verdict(program, self.ranks)
                self.words[f"of these with `whole` {found.word}"] += 1
                if found.word == "refused":
                    self.failures.setdefault(f"with `whole` {found.kind}", []).append(number)
        if found.word in ("wrong", "said"):
            known = found.kind in self.failures
            self.failures.setdefault(found.kind, []).append(number)
            if not known:
                self.keep(program, number, found)
        return found

    def keep(self, program: Program, number: int, found: Verdict) -> None:
        """As small as it gets, on ranks that have seen nothing else; or, if it is right there, as it is."""
        with Player(self.strategy) as fresh:
            again = self.verdict(program, fresh)
            if again.word != found.word:
                before = f"these had played programs {number - 3} to {number - 1} before"
                note = f"on fresh ranks it is {again.word}; {before}"
            else:
                note = "on fresh ranks, too"
                if self.shrink:
                    kind = again.kind if again.why.startswith("a bare error") else again.word
                    program = shrunk(program, lambda one: kind in ((v := self.verdict(one, fresh)).kind, v.word))
                    found = self.verdict(program, fresh)
        title = f"{self.strategy}, program {number} of seed {self.seed}: {found.word}, {note}"
        text = f'"""{title}\n\n{found.why}\n"""\n\n{program}\n'
        path = self.folder / f"{self.strategy}-{self.seed}-{number}.py"
        path.write_text(text)
        print(f"--- {path}\n{text}", flush=True)

    def report(self) -> str:
        total = sum(count for word, count in self.words.items() if not word.startswith("of these"))
        lines = [f"{self.strategy}, seed {self.seed}: {total} programs: " + ", ".join(
            f"{count} {word}" for word, count in self.words.most_common())]  # fmt: skip
        lines += [f"  {count:4d} × {sentence}" for sentence, count in self.refusals.most_common()]
        lines += [f"  {len(numbers):4d} × {kind}: programs {numbers[:8]}" for kind, numbers in self.failures.items()]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default=",".join(STRATEGIES), help="one, or several with commas")
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--number", type=int, help="this program alone, shown whole")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so long")
    given = parser.parse_args()
    wrong = 0
    for strategy in given.strategy.split(","):
        played = Round(strategy, given.seed, given.folder, not given.no_shrink)
        until = time.monotonic() + given.seconds
        try:
            numbers = [given.number] if given.number is not None else range(given.first, given.first + given.examples)
            if given.number is not None:
                print(suited(draw(given.seed, given.number), strategy))
            for number in numbers:
                if time.monotonic() > until:
                    break
                found = played.play(number)
                if given.number is not None:
                    print(found.word, found.why)
        finally:
            played.close()
            print(played.report(), flush=True)
        wrong += played.words["wrong"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
