"""Maps names to classes, which are loaded on use. What a class needs is known without importing it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from nbtrain.base.errors import NotSupported, UsageError, VersionMismatch
from nbtrain.base.specs import Needs
from nbtrain.compat import strategy_packages


@dataclass(frozen=True, slots=True)
class Entry:
    """One strategy, engine or view: its class, what it needs, what it is for."""

    name: str
    where: str
    """`module:Class`"""
    summary: str
    _: KW_ONLY
    shards: str = "nothing"
    in_pieces: bool = False
    """no rank has a whole model: after a failure its last step comes home only if all ranks stand at the same one"""
    needs: Needs = Needs()
    unrun: str = ""
    """what it was never run on; shown wherever it is offered"""
    package: str = ""
    """the package that announces it; empty for nbtrain's own"""
    internals: tuple[str, ...] = strategy_packages.EVERYWHERE
    """files of `compat` without which it cannot be run"""
    instead: str = ""
    """the strategy to use where these do not fit"""
    remote: bool = False
    """an engine whose ranks are on other machines"""

    def load(self) -> Any:
        try:
            return resolve_name(self.where)
        except Exception as error:
            if not self.package:
                if reason := left_out(self.name, self.where.partition(":")[0].rpartition(".")[0]):
                    raise NotSupported(reason) from error
                strategy_packages.explain(error)
                raise
            raise UsageError(
                f"the strategy {self.name}, which the package {self.package} announces as {self.where}, cannot be "
                f"loaded: {type(error).__name__}: {error}"
            ) from error


def _table(*entries: Entry) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


HOROVOD = f"NBTRAIN_ENVIRONMENT={sys.prefix} .ci/horovod in a checkout of nbtrain"
"""a plain `pip install` of it fails to build with today's torch"""

STRATEGIES: Mapping[str, Entry] = _table(
    Entry("none", "nbtrain.strategies.none:NoStrategy", "ranks and a process group, nothing touched", internals=()),
    Entry("single", "nbtrain.strategies.single:Single", "one process, one device", needs=Needs(max_ranks=1)),
    Entry("dp", "nbtrain.strategies.dp:DP",
          "one process, a thread for each device; a batch is cut over them, and what the model returns is put "
          "together on the first", shards="a batch", needs=Needs(together=True)),
    Entry("ddp", "nbtrain.strategies.ddp:DDP",
          "every rank holds the model and a share of the batches; gradients are averaged", shards="batches"),
    Entry("ddp2", "nbtrain.strategies.ddp2:DDP2",
          "ddp from node to node; in a node a batch is cut over its ranks, and outputs are gathered (--nodes)",
          shards="batches of nodes, a batch in a node"),
    Entry("zero1", "nbtrain.strategies.zero1:Zero1",
          "as ddp; each rank keeps the optimizer's state of a share of the parameters, and steps these",
          shards="batches, optimizer", in_pieces=True),
    Entry("sharded", "nbtrain.strategies.sharded:Sharded",
          "FairScale: as zero1, and a gradient is kept by the rank that steps its parameter",
          shards="batches, optimizer, gradients", in_pieces=True,
          needs=Needs(min_ranks=2, packages=("fairscale",), install="pip install --no-build-isolation fairscale"),
          internals=(*strategy_packages.EVERYWHERE, "dtensor", "fairscale"), instead="zero1"),
    Entry("fsdp", "nbtrain.strategies.fsdp:FSDP",
          "every rank holds a part of all there is; a layer is gathered while it computes",
          shards="batches, optimizer, gradients, parameters", in_pieces=True,
          internals=(*strategy_packages.EVERYWHERE, "fsdp2", "dtensor"), instead="ddp"),
    Entry("deepspeed", "nbtrain.strategies.deepspeed:DeepSpeed",
          "ZeRO: ranks share out the optimizer's state, gradients (stage 2) and parameters (stage 3)",
          shards="batches, optimizer, gradients, parameters", in_pieces=True,
          needs=Needs(min_ranks=2, packages=("deepspeed",), install='pip install "deepspeed>=0.19.8,<0.20" ninja'),
          internals=(*strategy_packages.EVERYWHERE, "deepspeed"), instead="fsdp"),
    Entry("pipeline", "nbtrain.strategies.pipeline:Pipeline",
          "every rank holds some layers of the model; a batch goes through all, cut into micro-batches",
          shards="optimizer, gradients, parameters", in_pieces=True, needs=Needs(min_ranks=2),
          internals=(*strategy_packages.EVERYWHERE, "dtensor"), instead="ddp"),
    Entry("horovod", "nbtrain.strategies.horovod:Horovod",
          "as ddp; gradients are averaged by Horovod", shards="batches",
          needs=Needs(min_ranks=2, packages=("horovod",), install=HOROVOD),
          internals=(*strategy_packages.EVERYWHERE, "horovod"), instead="ddp"),
    Entry("xla", "nbtrain.strategies.xla:XLA",
          "as ddp, on TPUs", shards="batches", in_pieces=True, needs=Needs(kinds=("tpu",), packages=("torch_xla",)),
          internals=(*strategy_packages.EVERYWHERE, "dtensor", "xla"), instead="ddp", unrun="not run on hardware"),
)  # fmt: skip

AUTO = ("single", "ddp")
"""What `auto` may become: on one device, on several; on a TPU it is AUTO_TPU."""
AUTO_TPU = "xla"

ENGINES: Mapping[str, Entry] = _table(
    Entry("local", "nbtrain.engines.local:LocalPool",
          "warm processes on this machine", needs=Needs(kinds=("cpu", "cuda", "tpu"))),
    Entry("inprocess", "nbtrain.engines.inprocess:InProcess",
          "one rank inside the kernel; breakpoints work", needs=Needs(max_ranks=1)),
    Entry("elastic", "nbtrain.engines.elastic:ElasticPool",
          "warm processes on machines that have joined: %distributed join", remote=True),
    Entry("ssh", "nbtrain.annexes.machines.ssh:SshPool",
          "warm processes on the machines of --hosts", remote=True),
    Entry("slurm", "nbtrain.annexes.machines.slurm:SlurmPool",
          "warm processes on nodes that SLURM gives", remote=True),
    Entry("ray", "nbtrain.annexes.machines.ray_cluster:RayPool",
          "warm processes on the machines of a Ray cluster", needs=Needs(packages=("ray",)), remote=True),
)  # fmt: skip

VIEWS: Mapping[str, Entry] = _table(
    Entry("widget", "nbtrain.watch.views.widget:WidgetView",
          "a dashboard with curves and buttons", needs=Needs(notebook=True), instead="html"),
    Entry("html", "nbtrain.watch.views.html:HtmlView",
          "one output that is replaced, for pages without widgets", needs=Needs(notebook=True)),
    Entry("text", "nbtrain.watch.views.text:TextView", "lines of text, for terminals and logs"),
    Entry("off", "nbtrain.watch.views:NoView", "nothing"),
)  # fmt: skip
"""`--monitor` takes these names, and `auto`"""

_announced: dict[str, Entry] = {}
"""strategies of other packages that were found so far"""


def strategies() -> dict[str, Entry]:
    """The built-in strategies and those that other packages announce (entry point group `nbtrain.strategies`)."""
    for point in entry_points(group="nbtrain.strategies"):
        if point.name not in STRATEGIES:
            package = point.dist.name if point.dist is not None else point.module
            _announced[point.name] = Entry(
                name=point.name, where=f"{point.module}:{point.attr}", summary=f"from {package}", package=package
            )
    return {**STRATEGIES, **_announced}


def find_strategy(name: str) -> Entry | None:
    """The strategy of this name, or None. Other packages are searched only for names that nbtrain does not have: that
    takes milliseconds, and every cell asks."""
    return STRATEGIES.get(name) or _announced.get(name) or strategies().get(name)


def load_strategy(name: str, namespace: Mapping[str, Any]) -> Any:
    """The class of this name in the registry, or a class or object of the notebook."""
    entry = find_strategy(name)
    return entry.load() if entry is not None else namespace[name]


def forms_no_group(name: str) -> bool:
    """Whether a cell under it may form a process group of its own: nothing is shared out."""
    entry = find_strategy(name)
    return entry is not None and entry.shards == "nothing"


def make_strategy(name: str, options: Mapping[str, Any], namespace: Mapping[str, Any]) -> Any:
    """A strategy with these options. An object of the notebook is used as it is, unless the options differ from its
    own."""
    entry = find_strategy(name)
    needs, instead = (entry.internals, entry.instead) if entry is not None else (strategy_packages.EVERYWHERE, "")
    if reason := strategy_packages.refusal(name, needs, instead):
        raise VersionMismatch(reason)
    given = load_strategy(name, namespace)
    make: Any = given if isinstance(given, type) else type(given)
    wanted = make.Options(**options)
    return given if given is not make and given.options == wanted else make(wanted)


def strategy(name: str) -> Entry:
    return find_strategy(name) or _lookup("strategy", name, strategies())


def engine(name: str) -> Entry:
    return _lookup("engine", name, ENGINES)


def view(name: str) -> Entry:
    return _lookup("monitor", name, VIEWS)


def missing(needs: Needs) -> str | None:
    """Which packages are missing for it, and the command that adds them."""
    gone = [name for name in needs.packages if find_spec(name) is None]
    return f"{', '.join(gone)} is not installed: {to_install(needs, gone)}" if gone else None


def to_install(needs: Needs, gone: list[str]) -> str:
    """The line that adds the packages that are not there."""
    return needs.install or f"pip install {' '.join(gone)}"


def lacking(needs: Needs) -> str | None:
    """Why it cannot be used on this machine."""
    # on use: it imports psutil, which is not needed to read the tables
    import nbtrain.machine.gpus as gpus

    if reason := missing(needs):
        return reason
    here = {"cpu", *(["cuda"] if gpus.gpus() else []), *(["tpu"] if gpus.tpus() else [])}
    return (
        None if here.intersection(needs.kinds) else f"runs on {' and '.join(needs.kinds)}, which this machine has not"
    )


def left_out(what: str, package: str) -> str:
    """Why a part that an installation may lack cannot be used; empty where it is there."""
    try:
        there = find_spec(package) is not None
    except ModuleNotFoundError:
        there = False
    return "" if there else f"{what} is in {package}, which was left out of this installation of nbtrain"


def _lookup(what: str, name: str, known: Mapping[str, Entry]) -> Entry:
    try:
        return known[name]
    except KeyError:
        raise UsageError(f"unknown {what} {name!r}; there are: {', '.join(sorted(known))}") from None
