"""Launchers that people know from other packages, by their names and with their arguments, on the notebook's ranks.

`from nbtrain import notebook_launcher` in place of accelerate's, `TorchDistributor` in place of that of
`pyspark.ml.torch.distributor`. The function is called as it stands: it brings its own process group, `Accelerator` or
`DistributedDataParallel`, so nothing is done to its models (`--strategy none`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from nbtrain.annexes.frameworks.functions.run import call
from nbtrain.annexes.frameworks.functions.run_cell import errors_in_short
from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat import training_libraries
from nbtrain.worker.shell.run_script import run_script

PRECISION = "ACCELERATE_MIXED_PRECISION"
"""the environment variable that accelerate reads"""


@errors_in_short()
def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: Any = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Any = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """accelerate's, on ranks that are there before and stay: CUDA may have been used, objects that the function changes
    come home, and what rank 0's call returns is returned. Ports, addresses and rendezvous arguments are not needed."""
    if num_nodes > 1:
        raise NotSupported(f"num_nodes={num_nodes}: nbtrain's ranks are processes of this machine")
    if mixed_precision not in ("no", "fp16", "bf16", "fp8"):
        raise UsageError(f"mixed_precision={mixed_precision!r}: 'no', 'fp16', 'bf16' or 'fp8'")
    settings = Settings(mixed_precision)
    return call(_line(num_processes), {}, function, tuple(args), around=settings, what="notebook_launcher")


class TorchDistributor:
    """That of Databricks and Spark, on the notebook's ranks: `TorchDistributor(num_processes=2).run(train, 1e-3)`."""

    def __init__(
        self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True
    ) -> None:  # fmt: skip
        """`use_gpu`: where there is one. `local_mode`: the processes are of this machine in any case."""
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu

    @errors_in_short()
    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Call a function, or run a script with these arguments, and return what rank 0's call returns."""
        line = _line(self.num_processes) + ("" if self.use_gpu else " --accelerator cpu")
        if isinstance(train_object, str | os.PathLike):
            path, words = os.fspath(train_object), [str(word) for word in args]
            return call(line, {}, run_script, (path, words), what="TorchDistributor.run")
        return call(line, {}, train_object, args, kwargs, around=Settings(), what="TorchDistributor.run")


def _line(count: int | None) -> str:
    return "--strategy none" + (f" --devices {count}" if count else "")


class Settings:
    """On a rank: what these libraries remember of an earlier call does not count for this one."""

    def __init__(self, precision: str = "") -> None:
        """`precision`: accelerate's; empty: as it is in the environment."""
        self.precision = precision

    def __enter__(self) -> None:
        self._before = os.environ.get(PRECISION)
        if self.precision:
            os.environ[PRECISION] = self.precision
        training_libraries.forget_processes()

    def __exit__(self, *error: Any) -> None:
        os.environ.pop(PRECISION, None)
        if self._before is not None:
            os.environ[PRECISION] = self._before
        training_libraries.forget_processes()
        for value in vars(sys.modules["__main__"]).values():  # its precision was this call's
            if isinstance(value, nn.Module):
                training_libraries.take_wrapper(value)
