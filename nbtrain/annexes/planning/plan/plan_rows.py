"""Makes the rows of a plan: strategies of the registry, presets whose memory differs, strategies of the notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nbtrain.annexes.planning.plan import guide
from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.annexes.planning.plan.plan import Plan, Planned
from nbtrain.annexes.planning.profile.recompute import recomputed, repeated
from nbtrain.base import humanize
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import Needs
from nbtrain.machine import registry
from nbtrain.strategies import presets
from nbtrain.strategies.memory_estimate import Profile

UNTOUCHED = "none"
"""the strategy under which the user's code does everything itself, so that its memory cannot be estimated"""
NOT_KNOWN = "not known: it has no estimate(profile, world)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy or preset that may become a row."""

    name: str
    """as typed behind --strategy"""
    needs: Needs
    source: Any
    """an `Entry` of the registry, or a class or object of the notebook"""
    options: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    """further options as typed"""
    asks: bool = False

    @property
    def base(self) -> str:
        return self.source.name if isinstance(self.source, registry.Entry) else self.name

    def strategy(self) -> Any:
        """The strategy object. Call it only if `lacking` is empty: loading imports the packages it needs."""
        found: Any = self.source.load() if isinstance(self.source, registry.Entry) else self.source
        is_class = isinstance(found, type)  # mypy would know no Options of a `type`
        return found(found.Options(**self.options)) if is_class else found


def make(
    profile: Profile,
    devices: DeviceMemory,
    *,
    recompute: str = "",
    own: Mapping[str, Any] | None = None,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    bandwidth: float | None = None,
    goal: str = "speed",
    loss: str = "any",
) -> Plan:
    """The plan. `recompute`: the class whose activations further rows recompute; empty: that of the repeated blocks.
    `own`: strategies of the notebook, by name. `given`: options that the user gave, by strategy."""
    rows: list[Planned] = []
    kind = recompute or repeated(profile)
    less = recomputed(profile, kind) if kind else None
    for candidate in candidates(own or {}, given or {}, devices.pool.nodes):
        row = planned(candidate, profile, devices)
        added = _add(row, rows)
        if added and less is not None and not row.available and guide.place(candidate.name, True) is not None:
            rows.append(planned(candidate, less, devices))
    return Plan(profile=profile, devices=devices, rows=tuple(rows), bandwidth=bandwidth, goal=goal, loss=loss)


def candidates(own: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]], nodes: int = 1) -> Iterator[Candidate]:
    """Each strategy of the registry, followed by its presets; then strategies of the notebook."""
    for entry in registry.strategies().values():
        if entry.name == UNTOUCHED:
            continue
        options = given.get(entry.name, {})
        flags = humanize.flags(options)
        yield Candidate(
            name=entry.name, needs=entry.needs, source=entry, options=options, more=(flags,) if flags else ()
        )
        yield from (
            _preset(name, preset, entry, nodes)
            for name, preset in presets.PRESETS.items()
            if preset.strategy == entry.name and preset.options
        )
    for name, source in own.items():
        yield Candidate(name=name, needs=Needs(), source=source)


def _preset(name: str, preset: presets.Preset, entry: registry.Entry, nodes: int) -> Candidate:
    """A preset as a candidate. Values that it asks the user for are guessed, or left for the user to fill in."""
    needs = entry.needs
    if "replicas" in preset.asks:
        replicas = max(2, nodes)
        options: dict[str, Any] = {"replicas": replicas}
        more, asks = humanize.flags(options), False
        needs = replace(needs, min_ranks=2 * replicas)
    elif "nvme-path" in preset.asks:
        options, more, asks = {"nvme_path": "DIR"}, preset.asks, True
    else:
        options, more, asks = {}, preset.asks, bool(preset.asks)
    return Candidate(
        name=name,
        needs=needs,
        source=entry,
        options={**preset.options, **options},
        more=(more,) if more else (),
        asks=asks,
    )


def planned(candidate: Candidate, profile: Profile, devices: DeviceMemory) -> Planned:
    """The row of a candidate. Errors of the strategy become part of the row."""
    world = devices.world(candidate.needs)
    recompute = profile.recomputed
    again = f"{guide.RECOMPUTE} {','.join(recompute)}" if recompute else ""
    row = Planned(
        name=f"{candidate.name} + {again}" if again else candidate.name,
        strategy=candidate.name,
        base=candidate.base,
        line=devices.line(candidate.name, world, (*candidate.more, again)),
        world=world,
        room=devices.may_have(world, profile.parameters + profile.buffers + profile.state),
        host=devices.host,
        options=candidate.options,
        recompute=recompute,
        available=lacking(candidate, devices),
        asks=candidate.asks,
    )
    if row.available:
        return row
    try:
        estimate = candidate.strategy().estimate(profile, world)
    except UsageError as error:
        return replace(row, available=str(error))
    except Exception as error:  # of somebody else's class: it must not take the other rows with it
        return replace(row, note=f"its estimate failed: {type(error).__name__}: {error}")
    if estimate is None:
        return replace(row, note=NOT_KNOWN)
    return replace(row, estimate=estimate, note=" ".join(estimate.notes))


def lacking(candidate: Candidate, devices: DeviceMemory) -> str:
    """Why the candidate cannot be used here; empty: it can."""
    needs, kind = candidate.needs, devices.pool.kind
    if reason := registry.lacking(needs):
        return reason
    if kind not in needs.kinds:
        return f"runs on {' and '.join(needs.kinds)}, and these devices are {kind}"
    ranks = devices.world(needs).ranks
    if ranks < needs.min_ranks:
        return f"needs {needs.min_ranks} devices: write --devices {needs.min_ranks}"
    return ""


def _add(row: Planned, rows: list[Planned]) -> bool:
    """Add the row unless one with the same estimate is there; of the two, keep the one that the guide names. True: it
    was added."""
    same = next((at for at, other in enumerate(rows) if _same(row, other)), None)
    if same is None:
        rows.append(row)
    elif guide.place(rows[same].strategy) is None:
        del rows[same]
        rows.append(row)
    else:
        return False
    return True


def _same(row: Planned, other: Planned) -> bool:
    if row.estimate is None or row.asks or row.recompute or other.recompute or row.world != other.world:
        return False
    return row.estimate == other.estimate and row.base == other.base
