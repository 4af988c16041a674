"""Draws where the processor time of an empty warm cell goes, in the kernel and on rank 0: docs/pictures/warm_cell.svg.

`python -m benchmarks.flame`. A timer of the process interrupts it every half millisecond of processor time; what is on
the stack then is counted, over two thousand cells.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from benchmarks.measure import kernel, run, say

D = "%%distributed --devices 2 --monitor off\n"
CELLS = 2000
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "warm_cell.svg"
SAMPLER = """
import signal, sys
sys.stacks = {}
def _sample(number, frame):
    found = []
    while frame is not None:
        code = frame.f_code
        found.append((getattr(code, "co_qualname", code.co_name), code.co_filename))
        frame = frame.f_back
    key = tuple(reversed(found))
    sys.stacks[key] = sys.stacks.get(key, 0) + 1
"""
ON = "signal.signal(signal.SIGPROF, _sample); signal.setitimer(signal.ITIMER_PROF, 0.0005, 0.0005)"
OFF = "signal.setitimer(signal.ITIMER_PROF, 0); signal.signal(signal.SIGPROF, signal.SIG_DFL)"
TOLD = "[[[*map(list, stack)], count] for stack, count in sys.stacks.items()]"
WIDTH, LINE, LETTER = 1160, 18, 6.2
LEAST = 3
"""Points; what is narrower is not drawn."""
COLOURS = {"nbtrain": "#7aa6d8", "IPython": "#c9c9c9", "torch": "#f0b27a", "": "#e4e4e4"}


@dataclass
class Box:
    """A function in its place on the stack."""

    name: str
    file: str
    count: int = 0
    above: dict[tuple[str, str], Box] = field(default_factory=dict)


def grown(samples: list[tuple[list[tuple[str, str]], int]], root: str) -> Box:
    """All samples as one tree, from the outermost call of `root` on."""
    tree = Box("all", "")
    for stack, count in samples:
        at = next((i for i, (name, _) in enumerate(stack) if name == root), None)
        if at is None:
            continue
        box = tree
        box.count += count
        for name, file in stack[at:]:
            box = box.above.setdefault((name, file), Box(name, file))
            box.count += count
    return tree


def depth(box: Box, total: int) -> int:
    wide = [one for one in box.above.values() if one.count * WIDTH / total >= LEAST]
    return 1 + max((depth(one, total) for one in wide), default=0)


def drawn(box: Box, total: int, left: float, top: int) -> list[str]:
    """A box and what it called, below it, the most expensive first."""
    width = box.count * WIDTH / total
    if width < LEAST:
        return []
    package = next((name for name in COLOURS if name and f"/{name}/" in box.file), "")
    letters = int(width / LETTER)
    text = box.name if len(box.name) <= letters else box.name[: letters - 1] + "…" if letters > 4 else ""
    share = f"{box.name}: {100 * box.count / total:.1f} %"
    found = [
        f'<g><title>{escape(share)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{LINE - 1}" '
        f'fill="{COLOURS[package]}" rx="2"/><text x="{left + 3:.1f}" y="{top + 13}">{escape(text)}</text></g>'
    ]
    for one in sorted(box.above.values(), key=lambda one: -one.count):
        found += drawn(one, total, left, top + LINE)
        left += one.count * WIDTH / total
    return found


def picture(sides: list[tuple[str, Box]]) -> str:
    lines, top = list[str](), 10
    for title, box in sides:
        lines.append(f'<text class="title" x="10" y="{top + 12}">{escape(title)}</text>')
        top += 22
        left = 10.0
        for one in box.above.values():
            lines += drawn(one, box.count, left, top)
            left += one.count * WIDTH / box.count
        top += LINE * depth(box, box.count) + 12
    style = "text{font:11px sans-serif;fill:#222}.title{font:bold 13px sans-serif}"
    size = f'width="{WIDTH + 20}" height="{top}" viewBox="0 0 {WIDTH + 20} {top}"'
    background = f'<rect width="{WIDTH + 20}" height="{top}" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{background}{"".join(lines)}</svg>\n'


def main() -> None:
    loop = f"for _ in range({CELLS}): get_ipython().run_cell_magic('distributed', '--devices 2 --monitor off', 'pass')"
    with kernel("%load_ext nbtrain", *[D + "pass"] * 5, SAMPLER, D + SAMPLER + ON) as k:
        run(k, f"{ON}\n{loop}\n{OFF}")
        here = run(k, say(TOLD))
        there = run(k, f"{D}{OFF}\nif rank == 0:\n    {say(TOLD).replace('; ', chr(10) + '    ')}")
    sides = [
        ("An empty warm cell in the kernel: processor time", grown(here, "InteractiveShell.run_cell_magic")),
        ("and on rank 0", grown(there, "Rank._answer")),
    ]
    PICTURE.write_text(picture(sides))
    print(json.dumps({title: box.count for title, box in sides}))


if __name__ == "__main__":
    main()
