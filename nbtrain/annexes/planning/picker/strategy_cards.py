"""The picker's cards: what each strategy is, whether it can be used here, what the plan says of its variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

import nbtrain.machine.host as host
from nbtrain.annexes.planning.plan import guide
from nbtrain.annexes.planning.plan.plan import Plan
from nbtrain.annexes.planning.plan.plan_rows import UNTOUCHED, Candidate, planned
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import Needs
from nbtrain.machine import registry
from nbtrain.machine.devices import Machine
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.line.values import Namespace
from nbtrain.notebook.magics.own_strategies import checked, of_notebook, says
from nbtrain.strategies import presets

Data = dict[str, Any]

FEW = 4
"""cards that are shown before the user asks for more"""


def found(machine: Machine, kind: str) -> list[Data]:
    """The devices, each with its memory and how much of that is in use."""
    if kind == "cuda":
        return [
            {"name": f"GPU {at} · {card.name}", "total": card.total, "used": card.used}
            for at, card in enumerate(machine.cards())
        ]
    memory = host.memory()
    name = f"CPU · {machine.cores} core{'s' * (machine.cores != 1)}"
    return [{"name": name, "total": memory.limit, "used": memory.limit - min(memory.limit, memory.available)}]


def cards(
    entries: Mapping[str, registry.Entry],
    notebook: Namespace,
    kind: str,
    ranks: int,
    plan: Data | None,
    chosen: str,
) -> list[Data]:
    """A card for each strategy. `plan`: its data, if there is a plan; `chosen`: the name of the
    chosen variant."""
    rows = [] if plan is None else plan["rows"]
    best = "" if plan is None else plan["recommended"] or ""
    described = [
        (name, entry.summary + (f"; {entry.unrun}" if entry.unrun else ""), against(entry.needs, kind, ranks))
        for name, entry in entries.items()
    ]
    described += [
        (name, ": ".join(filter(None, ["defined in this notebook", says(value)])), _wrong(name, value))
        for name, value in of_notebook(notebook).items()
    ]
    return [
        {"name": name, "summary": summary} | _variants(name, reason, rows, chosen, best)
        for name, summary, reason in described
    ]


def by_goal(cards: Sequence[Data], goal: str, ranks: int) -> list[Data]:
    """The cards as they suit the goal, the best first and what cannot be used last. The first few say so."""

    def suits(card: Data) -> tuple[Any, ...]:
        shown, place = card["shown"], guide.place(card["name"])
        speed = inf if place is None else place
        peak = shown["memory"]["peak"] if shown["memory"] else inf
        of_no_use = bool(card["reason"]), card["name"] == UNTOUCHED
        alone = ranks > 1 and card["name"] == "single"
        wanted = speed if goal == "speed" else peak
        return *of_no_use, not card["recommended"], shown["fits"] is False, alone, wanted, speed

    ordered = sorted(cards, key=suits)
    return [{**card, "first": at < FEW and not card["reason"]} for at, card in enumerate(ordered)]


def against(needs: Needs, kind: str, ranks: int) -> str:
    """Why it cannot be used, and what to change; empty where it can."""
    if lacks := registry.lacking(needs):
        return lacks
    if kind not in needs.kinds and needs.kinds != ("tpu",):
        return f"runs on {' and '.join(needs.kinds)}, and these devices are {kind}"
    if not needs.together and ranks < needs.min_ranks:
        return f"needs {needs.min_ranks} ranks: set Ranks to {needs.min_ranks}"
    return ""


def variant_name(strategy: str, recompute: str) -> str:
    """Its name in the plan."""
    return f"{strategy} + --checkpoint-activations {recompute}" if recompute else strategy


def _variants(name: str, reason: str, rows: Sequence[Data], chosen: str, best: str) -> Data:
    """The strategy, its presets and other variants in the plan; and which of them its card shows."""
    known = {row["name"]: row for row in rows if _registry_name(row["strategy"]) == name}
    stand = {name: f"--strategy {name}"}
    stand |= {one: presets.PRESETS[one].line for one in presets.names() if presets.PRESETS[one].strategy == name}
    stand |= {one: row["line"] for one, row in known.items() if one not in stand}
    made = [_variant(one, says, known.get(one), chosen, best) for one, says in stand.items()]
    shown = next((one for one in made if one["chosen"]), None)
    shown = shown or next((one for one in made if one["recommended"]), made[0])
    return {
        "variants": made,
        "shown": shown,
        "chosen": shown["chosen"],
        "recommended": any(one["recommended"] for one in made),
        # Reasons that depend on the model, or on the number of ranks, are known only with a plan.
        "reason": reason or (made[0]["reason"] if all(one["reason"] for one in made if one["planned"]) else ""),
    }


def _variant(name: str, stands: str, row: Mapping[str, Any] | None, chosen: str, best: str) -> Data:
    # A variant with options to fill in can be chosen; they are asked for then.
    whole = row is not None and not row["asks"]
    return {
        "name": name,
        "stands": stands,
        "line": row["line"] if row is not None and whole else f"--strategy {name}",
        "planned": whole,
        "chosen": name == chosen,
        "recommended": name == best,
        "reason": row["available"] if row is not None and whole else "",
    } | figures(row)


def figures(row: Mapping[str, Any] | None) -> Data:
    """The figures of a row of the plan: what it needs, and what is free."""
    row = row or {}
    return {
        "memory": row.get("estimate"),
        "room": row.get("room"),
        "fits": row.get("fits"),
        "tight": row.get("tight", False),
        "note": row.get("note", ""),
        "seconds": row.get("seconds"),
    }


def exact(plan: Plan, name: str, chosen: Chosen, options: Mapping[str, Any]) -> Data:
    """The figures of a variant with just these options."""
    candidate = Candidate(name=name, needs=chosen.needs, source=chosen.source, options=options)
    row = planned(candidate, plan.profile, plan.devices)
    estimate = None if row.estimate is None else asdict(row.estimate)
    note = "" if name == UNTOUCHED else row.note
    return figures({"estimate": estimate, "room": row.room, "fits": row.fits, "tight": row.tight, "note": note})


def _registry_name(strategy: str) -> str:
    preset = presets.find(strategy)
    return preset.strategy if preset is not None else strategy


def _wrong(name: str, value: Any) -> str:
    try:
        checked(value, name)
    except UsageError as error:
        return str(error)
    return ""
