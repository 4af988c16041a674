"""The pages of the documentation as a reader meets them: blocks in the order in which they stand, and what each is.

A block's language says what it is for:

- `python`: a cell. The cells of a page run one after another, pasted into one new notebook
- `output`: what the cell above it shows. Figures may differ; `…` stands for anything
- `python elsewhere`: a cell for which a machine, a card or a file is needed that a reader may not have
- anything else (`sh`, `toml`, `text`): to be typed elsewhere, or to be read
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
_FIGURE = re.compile(r"[+−-]?\d[\d,.]*(?:–[\d,.]+)?(?:e[+-]?\d+)?(?: ?(?:[kMG]?B|ms|s|%|×)(?!\w))?")
_WEIGHT = re.compile(r"\bmodel\.[\w.]+")
"""which of a model's weights rounding moves most is chance"""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    language: str
    text: str

    @property
    def is_cell(self) -> bool:
        return self.language == "python"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    return [Block(language, text) for _, language, text in _FENCE.findall(page.read_text(encoding="utf-8"))]


def outside_of_blocks(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def lines_not_shown(told: str, shown: str) -> list[str]:
    """The lines of an `output` block that were not shown, in their order and with any figures."""
    left = iter([_without_figures(line) for line in shown.splitlines()])
    wanted = [line for line in told.splitlines() if line.strip(" ─…")]
    return [line for line in wanted if not any(re.fullmatch(_pattern(line), one) for one in left)]


def _without_figures(line: str) -> str:
    return _FIGURE.sub("#", _WEIGHT.sub("model.#", " ".join(line.replace("★", "").split())))


def _pattern(line: str) -> str:
    return ".*".join(map(re.escape, _without_figures(line).split("…")))
