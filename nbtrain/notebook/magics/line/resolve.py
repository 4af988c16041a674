"""Turns what the user gave into a RunSpec: chooses strategy, devices and options, or says in one line why not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from nbtrain.base.errors import UsageError
from nbtrain.base.specs import PRECISIONS, MachinesWanted, Needs, PoolSpec, RunSpec
from nbtrain.machine import registry
from nbtrain.notebook.magics.line import values
from nbtrain.notebook.magics.line.options import OPTIONS
from nbtrain.notebook.magics.line.parse import Given, Request
from nbtrain.notebook.magics.line.split_line import Word
from nbtrain.notebook.magics.line.values import DeviceSpec, Namespace
from nbtrain.strategies import presets
from nbtrain.strategies.base import Strategy
from nbtrain.strategies.presets import Preset

if TYPE_CHECKING:
    from nbtrain.machine.devices import Devices
    from nbtrain.notebook.magics.line.strategy_flags import Flag
    from nbtrain.notebook.session import Session


AS_THEY_ARE = (
    "accumulate", "split_batches", "share_eval", "scale_lr", "checkpoint_activations", "background", "keep", "save_to",
    "keep_last", "hang_after", "profile", "detect_anomaly", "debug_ranks", "output", "monitor",
)  # fmt: skip
"""options whose value is the RunSpec's field of the same name"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A strategy before it is loaded: the registry's, or one of the notebook's own."""

    name: str
    needs: Needs
    source: registry.Entry | Strategy | type[Strategy]
    preset: Preset | None = None
    """the preset whose name was given"""

    @classmethod
    def named(cls, name: str, notebook: Namespace) -> Chosen:
        preset = presets.find(name)
        if preset is not None:
            real = registry.strategy(preset.strategy)
            return cls(name=real.name, needs=real.needs, source=real, preset=preset)
        entry = registry.find_strategy(name)
        if entry is not None:
            return cls(name=name, needs=entry.needs, source=entry)
        return cls(name=name, needs=Needs(), source=notebook[name])

    @property
    def ours(self) -> bool:
        return isinstance(self.source, registry.Entry) and not self.source.package

    def flags(self) -> dict[str, Flag]:
        from nbtrain.notebook.magics.line.strategy_flags import flags_of

        return flags_of(self.load())

    def load(self) -> type[Strategy]:
        """The class; raises if it is not nbtrain's and cannot be used."""
        source: Any = self.source.load() if isinstance(self.source, registry.Entry) else self.source
        if self.ours:
            ours: type[Strategy] = source
            return ours
        from nbtrain.notebook.magics.own_strategies import checked

        return checked(source, f"-s {self.name}: {self._where}")

    @property
    def _where(self) -> str:
        return self.source.where if isinstance(self.source, registry.Entry) else self.name

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the options of a strategy that is not nbtrain's; nbtrain's own are checked on the ranks."""
        if not self.ours:
            from nbtrain.notebook.magics.line.strategy_flags import flags_of
            from nbtrain.notebook.magics.own_strategies import check_options

            cls = self.load()
            flags_of(cls)
            check_options(cls, options)

    def over(self, line: Request, base: Request) -> Request:
        """`line` over `base`, with the preset's `--start`, which beats what was given before the preset's name."""
        request = line.over(base)
        start = self.preset.start if self.preset is not None else None
        said = line if "strategy" in line.given else request
        if start is None or "start" in said.given:
            return request
        return replace(request, given={**request.given, "start": Given(start, request.given["strategy"].typed)})

    def carried(self) -> dict[str, Any]:
        """Options that come with the name: of a preset, or of an object of the notebook."""
        if self.preset is not None:
            return dict(self.preset.options)
        if not isinstance(self.source, Strategy):
            return {}
        return {option.name: getattr(self.source.options, option.name) for option in fields(self.source.options)}


class Resolver:
    """Keeps the devices that `auto` and `free:2` stand for, and the lease on them, until the ranks stop."""

    def __init__(self, session: Callable[[], Session | None] = lambda: None) -> None:
        """`session`: whose ranks have the devices, if there are any."""
        self._session = session
        self._known: tuple[Any, Devices] | None = None
        self._ranks: int | None = None

    def forget(self) -> None:
        """The ranks are gone, so their devices are free again."""
        if self._known is not None and self._known[1].lease is not None:
            self._known[1].lease.close()
        self._known = self._ranks = None

    def world_size(self) -> int | None:
        """The number of ranks that were asked for last."""
        return self._ranks

    def pool(self, request: Request, needs: Iterable[tuple[str, Needs]] = ()) -> PoolSpec:
        """The processes that `request` asks for. `needs`: (flag, its needs) of whatever limits them."""
        engine = registry.engine(request.value("engine"))
        limits = [(f"--engine {engine.name}", engine.needs), *needs]
        together = any(need.together for _, need in limits)
        auto = request.value("devices").chosen_by_us
        # auto leases every free card; a strategy that can use only one should take only one
        alone = auto and not together and any(need.max_ranks == 1 for _, need in limits)
        accelerator = request.value("accelerator")
        if accelerator == "auto" and any(need.kinds == ("tpu",) for _, need in limits):
            accelerator = "tpu"
        if "engine" not in request.given and "hosts" in request.given:
            raise UsageError(f"{request.given['hosts'].typed} is for --engine ssh: write that, too")
        if engine.remote:
            return self._on_machines(request, engine, accelerator, limits)
        chosen = self._devices(request, DeviceSpec("free:1") if alone else request.value("devices"), accelerator)
        names = chosen.names
        for who, need in limits:
            if need.max_ranks is not None and len(names) > need.max_ranks and not together:
                if not auto:
                    instead = "--engine local" if who.startswith("--engine") else "--strategy ddp"
                    raise UsageError(
                        f"{who} takes {_count(need.max_ranks)} and {request.given['devices'].typed} is "
                        f"{len(names)}: write --devices {need.max_ranks}, or {instead}"
                    )
                names = names[: need.max_ranks]
            _check_needs(who, need, 1 if together else len(names), chosen.kind)
        together = together and len(names) > 1  # with one device the pool is the same as for any strategy
        self._ranks = 1 if together else len(names)
        nodes = _nodes(request, self._ranks, next((who for who, need in limits if need.together), ""))
        return PoolSpec(
            engine=engine.name,
            start=_start(request, chosen.kind),
            kind=chosen.kind,
            devices=tuple(names),
            uuids=tuple(chosen.uuids[: len(names)]),
            oversubscribe=request.value("oversubscribe"),
            together=together,
            nodes=nodes,
        )

    def _on_machines(
        self, request: Request, engine: registry.Entry, accelerator: str, limits: Iterable[tuple[str, Needs]]
    ) -> PoolSpec:
        """Ranks on several machines: `--devices` counts on each of them, `--nodes` the machines."""
        from nbtrain.engines.remote.resolve_machines import pool_spec  # on use, as few notebooks need it

        if reason := registry.missing(engine.needs):  # what finds the machines
            raise UsageError(f"--engine {engine.name}: {reason}")
        for who, need in limits:
            if need.together or need.max_ranks == 1:
                raise UsageError(f"{who} is one process; on several machines take --strategy ddp, or --engine local")
        if request.value("hosts") and engine.name == "elastic":
            raise UsageError("--hosts is for --engine ssh; with --engine elastic machines join by themselves")
        devices: DeviceSpec = request.value("devices")
        if isinstance(devices.value, str) and devices.value.strip().lower().startswith("free:"):
            raise UsageError(
                f"--devices {devices.value} looks at who uses this machine's GPUs; on several machines write a number"
            )
        nodes = request.value("nodes") if "nodes" in request.given else None
        wanted = MachinesWanted(
            nodes=nodes[0] if isinstance(nodes, tuple) else nodes,
            most=nodes[1] if isinstance(nodes, tuple) else None,
            hosts=request.value("hosts"),
            devices=tuple(devices.value) if isinstance(devices.value, list) else devices.value,
            quoted=devices.quoted,
            accelerator=accelerator,
            python=request.value("python"),
            sbatch=request.value("sbatch"),
        )
        spec = pool_spec(
            engine.name, engine.load(), wanted,
            oversubscribe=request.value("oversubscribe"), start=request.value("start"), leaving=self._leaving,
        )  # fmt: skip
        for who, need in limits:
            if need.max_ranks is not None and need.max_ranks < spec.world_size:
                raise UsageError(f"{who} takes {_count(need.max_ranks)}, and there are {spec.world_size}")
            _check_needs(who, need, spec.world_size, spec.kind)
        self._ranks = spec.world_size
        return spec

    def run(self, line: Request, base: Request, notebook: Namespace, ranks: tuple[int, ...] | None = None) -> RunSpec:
        """The RunSpec of a cell with this `line` over the defaults `base`."""
        request = line.over(base)
        check_flags(line, base, notebook)
        name = request.value("strategy")
        if name == "auto" and request.value("accelerator") == "tpu":
            name = registry.AUTO_TPU
        if name == "auto":
            pool = self.pool(request)
            grows = pool.machines is not None and pool.machines.most is not None
            chosen = Chosen.named(registry.AUTO[pool.world_size > 1 or grows], notebook)
        else:
            chosen = Chosen.named(name, notebook)
            request = chosen.over(line, base)
            pool = self.pool(request, [(f"--strategy {name}", chosen.needs)])
        if ranks is not None and (wrong := [rank for rank in ranks if rank >= pool.world_size]):
            raise UsageError(
                f"there is no rank {', '.join(map(str, wrong))}: {_valid(pool.world_size)}; --devices asks for more"
            )
        if request.value("keep") and (pool.start == "fork" or pool.engine == "inprocess"):
            where = "--start fork" if pool.start == "fork" else "--engine inprocess"
            raise UsageError(f"--keep needs ranks that live on after the cell; with {where} there are none")
        if request.value("checkpoint_activations") and chosen.load().facts.hands_off:
            raise UsageError(
                f"--checkpoint-activations does nothing under --strategy {chosen.name}, which leaves models as they "
                "are: call torch.utils.checkpoint in the model, or take -s single or -s ddp"
            )
        save_steps, save_seconds = request.value("save_every") or (None, None)
        if request.value("scale_lr") and chosen.load().facts.hands_off:
            raise UsageError(
                f"{request.given['scale_lr'].typed}: under --strategy {chosen.name} nothing is touched; multiply the "
                "learning rate in the cell, or take another strategy"
            )
        if request.value("save_every") and ranks is not None:
            raise UsageError("--save-every needs all ranks: leave it out, or write %%distributed in place of %%rank")
        if request.value("background") and pool.engine == "inprocess":
            raise UsageError("--background needs ranks: --engine inprocess runs the cell in the kernel. Leave one out")
        options = own_options(chosen, name, line, base, notebook)
        if pool.nodes > 1:  # else the class, and torch with it, is the ranks' affair
            of_nodes = getattr(chosen.load().Options, "for_nodes", None)
            options = of_nodes(options, pool.nodes) if of_nodes is not None else options
        chosen.check(options)
        return RunSpec(
            pool=pool,
            strategy=chosen.name,
            chosen=name == "auto",
            options=options,
            precision=self._precision(request, chosen),
            sampler=not request.value("no_sampler"),
            ranks=ranks,
            save_steps=save_steps,
            save_seconds=save_seconds,
            resume=_resume(),
            log_to=self._writer(request, notebook),
            **{option: request.value(option) for option in AS_THEY_ARE},
        )

    @staticmethod
    def _precision(request: Request, chosen: Chosen) -> str:
        precision: str = request.value("precision")
        if precision != PRECISIONS[0] and chosen.load().facts.hands_off:
            raise UsageError(
                f"{request.given['precision'].typed}: under --strategy {chosen.name} nothing is touched, so the code "
                "says itself what it computes in; take another strategy, or leave the option out"
            )
        return precision

    @staticmethod
    def _writer(request: Request, notebook: Namespace) -> str:
        """Read the name again: as a default it was read some cells ago, and may hold something else now."""
        name: str = request.value("log_to")
        return values.writer("--log-to", Word(name), notebook) if name else ""

    def _devices(self, request: Request, spec: DeviceSpec, accelerator: str) -> Devices:
        from nbtrain.machine import devices

        oversubscribe = request.value("oversubscribe")
        key = (spec, accelerator, oversubscribe, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if self._known is None or self._known[0] != key:
            chosen = devices.resolve(
                spec.value, accelerator=accelerator, oversubscribe=oversubscribe, quoted=spec.quoted
            )
            session = self._session()
            if session is not None and session.is_busy():  # it has those that are known, and will refuse this
                return chosen
            self.forget()
            self._known = key, chosen
        return self._known[1]

    def _leaving(self) -> None:
        """Raises where the machines, and with them the ranks, cannot be exchanged for others."""
        if (session := self._session()) is not None:
            session.may_leave_ranks()


def own_options(chosen: Chosen, asked: str, line: Request, base: Request, notebook: Namespace) -> dict[str, Any]:
    """The strategy's own options: those that come with its name, and those of `line` over `base`."""
    options = chosen.carried()
    carried = set(options) if chosen.preset is not None and "strategy" in line.given else set()
    own = line.over(base).own
    if not own:  # nothing to check, so nothing to load
        return options
    from nbtrain.notebook.magics.line.strategy_flags import read

    known = chosen.flags()
    for typed, word in own.items():
        if typed in known and known[typed].field in carried and typed not in line.own:
            continue  # a preset's name in this line says more than a default of an earlier one
        if typed in known:
            options[known[typed].field] = read(typed, word, known[typed], notebook)
        elif typed in line.own:
            # check_flags let it pass, so it belongs to what else `auto` may become
            assert asked == "auto"
            raise UsageError(
                f"auto chose {chosen.name}, which has no {typed}: name the strategy that has, -s {registry.AUTO[1]}"
            )
    return options


def _check_needs(who: str, need: Needs, ranks: int, kind: str) -> None:
    """Refuse too few ranks, devices of another kind, and what is not installed."""
    if ranks < need.min_ranks:
        raise UsageError(f"{who} takes {_count(need.min_ranks)} or more, and there is {ranks}")
    if kind not in need.kinds:
        raise UsageError(f"{who} runs on {' and '.join(need.kinds)}, and these devices are {kind}")
    if reason := registry.missing(need):
        raise UsageError(f"{who}: {reason}")


def _start(request: Request, kind: str) -> str:
    start: str = request.value("start")
    if kind == "tpu" and start == "fork":
        raise UsageError(
            "--start fork: a process that was forked from the notebook's cannot have a TPU; leave the option out, and "
            "each rank is a fresh interpreter"
        )
    return "spawn" if kind == "tpu" else start


def flags_under(strategy: str, notebook: Namespace) -> dict[str, Flag]:
    """The strategy's own flags; under `auto` those of all that it may become."""
    names = registry.AUTO if strategy == "auto" else (strategy,)
    return {typed: flag for name in names for typed, flag in Chosen.named(name, notebook).flags().items()}


def check_flags(line: Request, base: Request, notebook: Namespace) -> None:
    """Refuse flags that neither the table nor the strategy has, and values that do not fit."""
    if not line.own:
        return
    from nbtrain.notebook.magics.line.strategy_flags import read
    from nbtrain.notebook.magics.line.suggestions import similar_flag

    known = flags_under(line.over(base).value("strategy"), notebook)
    for typed, word in line.own.items():
        if typed not in known:
            hint = similar_flag(typed, [*(option.flag for option in OPTIONS), *known])
            raise UsageError(f"there is no option {typed}{hint} (%distributed help is the manual)")
        read(typed, word, known[typed], notebook)


def _resume() -> tuple[str, bytes] | None:
    """Where loops go on, if a checkpoint was loaded in the notebook. Imports nothing to find out."""
    here = sys.modules.get("nbtrain.worker.checkpoints.api")
    return here.resume() if here is not None else None


def _nodes(request: Request, ranks: int, together: str) -> int:
    """The number of nodes; raises unless it divides the ranks into groups of equal size."""
    nodes: int | tuple[int, int] = request.value("nodes")
    if isinstance(nodes, tuple):
        raise UsageError(
            f"{request.given['nodes'].typed}: machines that come and go need an engine for several: --engine elastic"
        )
    if nodes > 1 and together:
        raise UsageError(
            f"{together} is one process with all the devices, so it cannot be on {nodes} nodes; "
            "--strategy ddp2 does the same in each node and averages over the nodes"
        )
    if ranks % nodes:
        raise UsageError(
            f"{request.given['nodes'].typed}: {ranks} rank{'s' * (ranks > 1)} cannot be {nodes} groups of equal size; "
            f"write --devices {nodes * max(1, round(ranks / nodes))}, or another number of nodes"
        )
    return nodes


def _count(number: int) -> str:
    return "one device" if number == 1 else f"{number} devices"


def _valid(world_size: int) -> str:
    return "the only rank is 0" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
