"""jupyter-distributed: a kernel that hands every cell to N kernels; in JupyterLab a field says how many."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.peer import Cannot, Peer


class JupyterDistributed(Peer):
    name = "jupyter-distributed"
    packages = ("jupyter-distributed==0.1.1",)
    # What its server extension makes of a kernel spec, without the server and the restart of the plain kernel.
    within = ("sh", "-c", 'for file; do :; done; exec "$0" -m jupyter_distributed.kernel -f "$file"')
    interrupts_by_message = True

    def environment(self, ranks: int) -> Mapping[str, str]:
        return {"JUPYTER_DISTRIBUTED_WORLD_SIZE": str(ranks)}

    def start(self, ranks: int) -> list[str]:
        return ["import torch.distributed as dist\ndist.init_process_group('gloo')"]

    def cell(self, code: str, ranks: int) -> str:
        return code

    def send(self, code: str, ranks: int) -> str:
        raise Cannot("has no notebook beside the ranks: every cell runs on all of them, so nothing is sent")

    def home(self, code: str, ranks: int) -> str:
        raise Cannot("has no notebook beside the ranks: nothing comes home")
