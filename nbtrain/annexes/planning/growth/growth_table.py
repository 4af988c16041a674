"""Renders predictions for more ranks, the checks behind them and what they assume, as text and HTML. Reads
`GrowthForecast.data()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from nbtrain.base import tables
from nbtrain.base.humanize import quantity, size

Data = Mapping[str, Any]

HEAD: tables.Row = ("ranks", "nodes", "a step", "at best", "samples/s", "efficiency", "communication", "sent per rank")
CHECKED: tables.Row = ("ranks here", "measured", "expected", "off by", "")
FAR_OFF = 0.25
"""relative error from which on a check has failed"""
WIDTH = 760


def text(forecast: Data) -> str:
    return "\n".join(
        [
            tables.text(*_predicted(forecast)),
            "",
            tables.text(CHECKED, [_checked(check) for check in forecast["checks"]]),
            "",
            _verdict(forecast),
            "",
            "This assumes:",
            *(f"- {sentence}" for sentence in forecast["assumes"]),
        ]
    )


def html(forecast: Data) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in forecast["assumes"])
    return (
        f'{tables.STYLE}<div style="max-width:{WIDTH}px;overflow-x:auto">{tables.html(*_predicted(forecast))}'
        f"{tables.html(CHECKED, [_checked(check) for check in forecast['checks']])}<p>{escape(_verdict(forecast))}</p>"
        f"<p>This assumes:</p><ul>{sentences}</ul></div>"
    )


def assumptions(forecast: Data) -> Iterator[str]:
    """What the predictions assume, in sentences. `forecast`: the rest of its data."""
    yield from _of_ranks(forecast)
    yield from _of_bytes(forecast)
    if latency := forecast["latency"]:
        yield f"a round between ranks takes {time(latency)} (fitted here); a step has log2(ranks) rounds"
    elif len(forecast["checks"]) > 1:
        yield "a round between ranks takes no time: none was found here"
    if overlap := forecast["overlap"]:
        yield f"{100 * overlap:.0f} % of the communication is hidden behind the computing"
    else:
        yield "none of the communication is hidden behind the computing"
    stated = f"{size(forecast['bandwidth'])}/s"
    yield f"at best: bytes travel at {stated} while the ranks compute"
    yield "data arrives in time, all ranks are equally fast, and the network is free"


def _of_ranks(forecast: Data) -> Iterator[str]:
    samples, own = forecast["samples_per_rank"], forecast["cores_per_rank"]
    batch = f"a rank's batch stays at {samples:g} samples; " if samples else ""
    cores = "1 core" if own == 1 else f"{own:g} cores"
    where = f"{cores} of its own" if forecast["cores"] else "a device of its own"
    yield f"{batch}every rank computes {time(forecast['compute'])} per step, as here, on {where}"
    crowded = [str(check["ranks"]) for check in forecast["checks"] if check["crowded"]]
    if crowded:
        shared = f"{' and '.join(crowded)} ranks shared {forecast['cores']:g} cores here"
        yield f"{shared}: the cost of sharing is subtracted"


def _of_bytes(forecast: Data) -> Iterator[str]:
    here, fitted, stated = forecast["local_bandwidth"], forecast["fitted"], f"{size(forecast['bandwidth'])}/s"
    if not any(row["sent"] for row in forecast["rows"]):
        yield "the bytes sent per step are not known: their time is left out"
        return
    if fitted[-1] == 1:
        yield f"communication was not measured: bytes travel at the stated {stated} between nodes, at once within one"
    elif here is None:
        yield f"bytes travel at the stated {stated} between nodes; within one they take no time: none was found here"
    elif here < forecast["bandwidth"]:
        found = f"bytes travel at {size(here)}/s (fitted here) within a node and between nodes"
        yield f"{found}: the stated {stated} is faster than any rank was here"
    else:
        within = f"at {size(here)}/s within one (fitted here)"
        yield f"bytes travel at the stated {stated} between nodes, and {within}"
    if len(fitted) == 2:
        yield "two counts of ranks cannot separate bandwidth from latency: all of it counts as bandwidth"
    if forecast["per_node"] > 1:
        ring = f"the {forecast['per_node']} ranks of a node share one ring with other nodes"
        yield f"{ring}: a node sends what one rank sends"


def _verdict(forecast: Data) -> str:
    """How far the fit can be trusted."""
    fitted, checks = forecast["fitted"], forecast["checks"]
    found = f"Fitted on {', '.join(map(str, fitted))} {'rank' if fitted == [1] else 'ranks'}"
    held_back = [check for check in checks if not check["fitted"]]
    if held_back:
        checked = max(held_back, key=_error)
        found += f", checked against {checked['ranks']}: off by {_percent(checked['error'])}."
    else:
        found += ", not checked."
    worst = max(checks, key=_error)
    if _error(worst) < FAR_OFF:
        return found
    what = "it" if not worst["fitted"] else f"what was measured on {_ranks(worst['ranks'])}"
    return f"{found} As {what} is that far off, read the table as an order of magnitude, or measure more steps."


def _error(check: Data) -> float:
    return abs(float(check["error"]))


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"


def _predicted(forecast: Data) -> tuple[tables.Row, list[tables.Row]]:
    rows: list[tables.Row] = [
        (
            f"{row['ranks']:,}", f"{row['nodes']:,}", time(row["seconds"]), time(row["at_best"]),
            quantity(row["samples_per_second"]), f"{100 * row['efficiency']:.0f} %",
            f"{100 * row['communication']:.0f} %", size(row["sent"]) if row["ranks"] > 1 else "",
        )
        for row in forecast["rows"]
    ]  # fmt: skip
    unknown = [at for at, name in enumerate(HEAD) if name == "samples/s" and not forecast["samples_per_rank"]]
    head, *rows = (tuple(cell for at, cell in enumerate(row) if at not in unknown) for row in (HEAD, *rows))
    return head, rows


def _checked(check: Data) -> tables.Row:
    how = "fitted" if check["fitted"] else "held back"
    return str(check["ranks"]), time(check["measured"]), time(check["expected"]), _percent(check["error"]), how


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %".replace("-", "−")


def time(seconds: float) -> str:
    """12 µs, 41.2 ms, 1.23 s"""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * one:
            return f"{quantity(seconds / one)} {unit}"
    return f"{quantity(seconds / 1e-6)} µs"
