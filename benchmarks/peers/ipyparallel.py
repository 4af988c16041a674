"""Engines of an ipyparallel cluster, `%%px`, `push` and `pull`; the process group is set up by hand."""

from __future__ import annotations

from benchmarks.peers.peer import Peer


class IPyParallel(Peer):
    name = "ipyparallel"
    packages = ("ipyparallel==9.2.0",)

    def start(self, ranks: int) -> list[str]:
        cluster = (
            "import os, ipyparallel\n"
            f"client = ipyparallel.Cluster(n={ranks}).start_and_connect_sync(activate=True)\n"
            "view = client[:]\n"
            f"view.scatter('rank', list(range({ranks})), flatten=True, block=True)\n"
            "view.push({'meeting': f'file://{os.getcwd()}/meeting'}, block=True)"
        )
        group = (
            "import torch.distributed as dist\n"
            f"dist.init_process_group('gloo', init_method=meeting, rank=rank, world_size={ranks})"
        )
        return [cluster, self.cell(group, ranks)]

    def cell(self, code: str, ranks: int) -> str:
        return f"%%px\n{code}"

    def send(self, code: str, ranks: int) -> str:
        return f"view.push({{'x': x}}, block=True)\nview.execute({code!r}, block=True);"

    def home(self, code: str, ranks: int) -> str:
        return f"view.execute({code!r}, block=True)\ny = view.pull('y', targets=0, block=True)"
