"""Turns one of Lightning's strategies into one whose processes are nbtrain's ranks."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nbtrain.errors import NotSupported
from nbtrain.lightning.cluster import Ranks, on_a_rank
from nbtrain.lightning.launcher import OnWarmRanks

if TYPE_CHECKING:
    from nbtrain.lightning.predict_batches import Dealing

PREFIX = "nbtrain_"
OTHER_STARTS = ("spawn", "fork", "notebook")
"""in the names of entries that say how processes are started: ours are there already"""


NOT_YET = (
    "nbtrain_{name}: the ranks run Lightning's ddp so far. Write strategy='nbtrain_ddp'; or make the Trainer with "
    "strategy='{name}' in a cell below %%distributed -s none, where Lightning does it all (weights come home as it "
    "leaves them); or write the loop, below %%distributed -s {ours}"
)

ONE_MACHINE = (
    "num_nodes={nodes}: nbtrain's ranks are processes of this machine. Leave it out, and count all of them in devices"
)


class OnRanks:
    """What our strategies have before Lightning's own class. On a rank there is nothing to launch."""

    dealing: Dealing | None = None
    """while it predicts on several ranks"""

    def _configure_launcher(self: Any) -> None:
        if self.num_nodes > 1:
            raise NotSupported(ONE_MACHINE.format(nodes=self.num_nodes))
        self.cluster_environment = Ranks(self.num_processes)
        self._launcher = None if on_a_rank() else OnWarmRanks(self)

    @property
    def launcher(self: Any) -> OnWarmRanks | None:
        return None if on_a_rank() else self._launcher

    @property
    def root_device(self: Any) -> torch.device:
        return torch.device(builtins.device) if on_a_rank() else self.parallel_devices[0]  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.dealing is not None:
            return self.dealing.share()
        found: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        return found

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.dealing is not None:
            self.dealing.deal(dataloader)
        return super().process_dataloader(dataloader)  # type: ignore[misc]


def on_ranks(theirs: Any, module: str) -> Any:
    """A subclass of theirs, of the same name, that lives in this module."""
    return type(theirs.__name__, (OnRanks, theirs), {"__module__": module, "__doc__": theirs.__doc__})


def register_all(registry: Any, ours: Iterable[Any]) -> None:
    """Register ours under each name that the registry has for the class it comes from; others that distribute are
    refused by name."""
    by_theirs = {cls.__mro__[2]: cls for cls in ours}
    for name, entry in list(registry.items()):
        if name.startswith(("single", PREFIX)) or any(word in name for word in OTHER_STARTS):
            continue
        cls = by_theirs.get(entry["strategy"], partial(_refuse, name))
        options = {key: value for key, value in entry["init_params"].items() if key != "start_method"}
        told = f"{entry['description']}; its processes are nbtrain's warm ranks"
        registry.register(PREFIX + name, cls, description=told, override=True, **options)


def _refuse(name: str, **_: Any) -> None:
    raise NotSupported(NOT_YET.format(name=name, ours=name.partition("_")[0]))
