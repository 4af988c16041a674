"""Which metrics share a chart: train and validation of one name. `js/src/metric_charts.js` does the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}
ORDER = ("", *SPLITS)
_KIND = {word: kind for kind, words in SPLITS.items() for word in words}
_WORDS = "|".join(sorted(_KIND, key=len, reverse=True))
_BEGINS = re.compile(rf"^({_WORDS})[_.\- ](?=.)", re.IGNORECASE)
_ENDS = re.compile(rf"(?<=.)[_.\- ]({_WORDS})$", re.IGNORECASE)


class Part(NamedTuple):
    name: str
    label: str
    """train, validation, test or its own name; empty where it is alone"""


class MetricChart(NamedTuple):
    title: str
    parts: Sequence[Part]


def split_of(name: str) -> tuple[str, str]:
    """`val_loss`, `val/loss` and `loss/val` are ("loss", "validation"); of a name that says nothing of it, the second
    is empty."""
    *before, last = parts = name.split("/")
    place = next((at for at, part in enumerate(parts) if part.lower() in _KIND), None)
    if place is not None and before:
        return "/".join(parts[:place] + parts[place + 1 :]), _KIND[parts[place].lower()]
    if match := _BEGINS.search(last) or _ENDS.search(last):
        rest = last[: match.start()] + last[match.end() :]
        return "/".join([*before, rest]), _KIND[match[1].lower()]
    return name, ""


def metric_charts(names: Iterable[str]) -> list[MetricChart]:
    """In the order in which the names came."""
    by_base: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        base, kind = split_of(name)
        by_base.setdefault(base, []).append((kind, name))
    return [MetricChart(base if len(parts) > 1 else parts[0][1], _labelled(parts)) for base, parts in by_base.items()]


def _labelled(parts: Sequence[tuple[str, str]]) -> list[Part]:
    if len(parts) == 1:
        return [Part(parts[0][1], "")]
    kinds = [kind for kind, _ in parts]
    plain = "" if "train" in kinds else "train"
    return [
        Part(name, name if kinds.count(kind) > 1 else kind or plain or name)
        for kind, name in sorted(parts, key=lambda part: ORDER.index(part[0]))
    ]
