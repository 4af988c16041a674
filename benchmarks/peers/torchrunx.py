"""torchrunx: `Launcher.run` starts an agent and workers for a function, and returns what each of them returned."""

from __future__ import annotations

from textwrap import indent

from benchmarks.peers.peer import Peer

START = """
import socket, torchrunx
socket.getfqdn = lambda name="": "127.0.0.1"
launcher = torchrunx.Launcher(
    hostnames=["127.0.0.1"], workers_per_host={ranks}, backend="gloo",
    extra_env_vars={{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}},
)
"""
"""It listens at the machine's full name; here at loopback."""
LAUNCH = """
def cell({takes}):
{code}
    {gives}
{result}launcher.run(cell{given}).rank(0)
"""


class TorchRunX(Peer):
    name = "torchrunx"
    packages = ("torchrunx==0.4.0",)
    keeps_ranks = False

    def start(self, ranks: int) -> list[str]:
        return [START.format(ranks=ranks)]

    def cell(self, code: str, ranks: int) -> str:
        return self._launch(code)

    def send(self, code: str, ranks: int) -> str:
        return self._launch(code, takes="x")

    def home(self, code: str, ranks: int) -> str:
        return self._launch(code, gives="y")

    def make_model(self, make: str, ranks: int) -> list[str]:
        return [make]

    def train(self, loop: str, ranks: int) -> str:
        wrapped = loop.replace("model,", "torch.nn.parallel.DistributedDataParallel(model),", 1)
        return self._launch(f"import torch\n{wrapped}", "model, optimizer, batch", "model, optimizer")

    def _launch(self, code: str, takes: str = "", gives: str = "") -> str:
        return LAUNCH.format(
            code=indent(code, "    "),
            takes=takes,
            given=f", {takes}" if takes else "",
            gives=f"return {gives}" if gives else "",
            result=f"{gives} = " if gives else "",
        )
