"""Ray Train: a local cluster, and `TorchTrainer`, which starts workers for a function; a checkpoint comes home."""

from __future__ import annotations

from textwrap import indent

from benchmarks.peers.peer import Peer

START = """
import os, tempfile, torch
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
import ray, ray.train
from ray.train.torch import TorchTrainer
ray.init(num_cpus={ranks} + 1, include_dashboard=False, _node_ip_address="127.0.0.1")
def fit(function):
    scaling = ray.train.ScalingConfig(num_workers={ranks}, use_gpu=False)
    where = ray.train.RunConfig(storage_path=os.getcwd() + "/ray")
    return TorchTrainer(function, scaling_config=scaling, run_config=where).fit()
def report(value):
    if ray.train.get_context().get_world_rank():
        return ray.train.report({{}})
    with tempfile.TemporaryDirectory() as folder:
        torch.save(value, folder + "/value")
        ray.train.report({{}}, checkpoint=ray.train.Checkpoint.from_directory(folder))
def value_of(result):
    with result.checkpoint.as_directory() as folder:
        return torch.load(folder + "/value", weights_only=False)
"""
FUNCTION = """
{before}
def cell():
{code}
{result}
"""


class Ray(Peer):
    name = "ray"
    packages = ("ray[train]==2.60.0",)
    keeps_ranks = False

    def start(self, ranks: int) -> list[str]:
        return [START.format(ranks=ranks)]

    def cell(self, code: str, ranks: int) -> str:
        return FUNCTION.format(before="", code=indent(code, "    "), result="fit(cell);")

    def send(self, code: str, ranks: int) -> str:
        body = indent(f"x = ray.get(sent)\n{code}", "    ")
        return FUNCTION.format(before="sent = ray.put(x)", code=body, result="fit(cell);")

    def home(self, code: str, ranks: int) -> str:
        return FUNCTION.format(before="", code=indent(f"{code}\nreport(y)", "    "), result="y = value_of(fit(cell))")

    def make_model(self, make: str, ranks: int) -> list[str]:
        return [make]

    def train(self, loop: str, ranks: int) -> str:
        wrapped = loop.replace("model,", "ray.train.torch.prepare_model(model),", 1)
        code = f"model, optimizer, batch = ray.get(sent)\n{wrapped}\nreport((model, optimizer))"
        return FUNCTION.format(
            before="sent = ray.put((model, optimizer, batch))",
            code=indent(code, "    "),
            result="model, optimizer = value_of(fit(cell))",
        )
