"""Lightning's own Trainer on warm ranks, from an ordinary cell: `Trainer(strategy="nbtrain_ddp", devices=4)`.

Each strategy of Lightning's registry that starts processes is registered once more, as `nbtrain_` and its name, with
nbtrain's ranks in place of those processes: by a launcher and a cluster environment, which are Lightning's own ways to
put in others. What the ranks run is Lightning's code.
"""

from __future__ import annotations

from typing import Any

PACKAGES = {
    "lightning.pytorch.strategies": "nbtrain.annexes.frameworks.lightning.register_lightning",
    "pytorch_lightning.strategies": "nbtrain.annexes.frameworks.lightning.register_pytorch_lightning",
}
"""module with Lightning's strategies, of its package or of the older one of the same content → module with ours"""


def __getattr__(name: str) -> Any:
    """`Strategy("fsdp --wrap Block")`: the strategy with options, for the package that the notebook has imported."""
    import sys
    from pkgutil import resolve_name

    if name != "Strategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = [ours for theirs, ours in PACKAGES.items() if theirs in sys.modules]
    return resolve_name((imported or [*PACKAGES.values()])[0]).Strategy


def register(theirs: str) -> None:
    """Register our strategies: this module of Lightning's has just been imported."""
    from pkgutil import resolve_name

    try:
        resolve_name(PACKAGES[theirs]).register()
    except Exception as error:  # Lightning itself has to be imported whatever its version lacks for us
        import warnings

        warnings.warn(
            f"nbtrain's strategies do not fit this version of Lightning, and are not registered: {error}", stacklevel=2
        )
