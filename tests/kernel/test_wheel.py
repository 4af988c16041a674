"""The wheel in an empty environment: what a user has who types `pip install nbtrain`, and one extra after another.

Nothing of this checkout is seen there. What pip installs is what constraints.txt pins, torch for the CPU among it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbtrain
from nbtrain.machine import registry
from tests.support.absent import absent
from tests.support.alike import TRAINING, WAYS, trains_as_one_process
from tests.support.kernels import ROOT, running_kernel
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.slow, pytest.mark.limit(900), pytest.mark.thorough]

OFFLINE = (
    r"(?i)(name resolution|NewConnectionError|timed out|network is unreachable|connection (refused|reset)|Max retries)"
)
PLAIN = [way for way in WAYS if not registry.strategy(way.split()[0]).needs.packages]
WITH = {"deepspeed": ("deepspeed 1", "deepspeed", "deepspeed 3"), "fairscale": ("sharded",)}
"""extra → what it is for. ray is not among them: nothing here starts ranks by it."""


class Environment:
    """An environment of its own, and the wheel in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin" / "python")
        venv.create(folder, with_pip=True)
        made = folder / "wheel"
        self.pip("wheel", "--no-deps", "--wheel-dir", str(made), str(ROOT))
        (self.wheel,) = made.glob("*.whl")

    def pip(self, *words: str) -> None:
        """Leaves the test out where there is no index."""
        pinned = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        command = [self.python, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]]
        done = subprocess.run(command, env=os.environ | pinned, cwd=self.folder, capture_output=True, text=True)
        if done.returncode and re.search(OFFLINE, done.stdout + done.stderr):
            absent("no index of packages can be reached", "go online")
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [self.python, *words], cwd=self.folder, env=self.environ(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def environ(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PYTHONPATH": "", "PATH": path}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("wheel"))
    assert made.wheel.name.startswith(f"nbtrain-{nbtrain.__version__}-")
    made.pip("install", str(made.wheel))
    return made


@pytest.fixture
def notebook(environment: Environment) -> Iterator[Notebook]:
    own = environment.environ()
    with running_kernel(python=environment.python, PYTHONPATH="", PATH=own["PATH"]) as kernel:
        yield Notebook(kernel)


def play(notebook: Notebook, *ways: str) -> None:
    for way in ways:
        notebook(TRAINING)
        trains_as_one_process(notebook, way)


def test_it_needs_nothing_else(environment: Environment, notebook: Notebook) -> None:
    """pip finds all that is declared; a notebook trains under every strategy that wants no extra."""
    environment.run("-m", "pip", "check")
    place = notebook("import nbtrain; print(nbtrain.__file__)").stdout.strip()
    assert Path(place).is_relative_to(environment.folder)
    shown = notebook("%distributed doctor").stdout
    assert "nothing stands in the way" in shown, shown
    play(notebook, *PLAIN)
    assert "pip install" in notebook.refused("%%distributed -s sharded -d 2\npass")


@pytest.mark.parametrize("extra", WITH)
def test_an_extra_brings_its_strategy(environment: Environment, request: pytest.FixtureRequest, extra: str) -> None:
    # Their setups look at the torch that is there, which an isolated build would not have.
    environment.pip("install", "setuptools", "wheel")
    environment.pip("install", "--no-build-isolation", f"{environment.wheel}[{extra}]")
    environment.run("-m", "pip", "check")
    play(request.getfixturevalue("notebook"), *WITH[extra])


def test_horovod_as_it_was_compiled(environment: Environment, request: pytest.FixtureRequest) -> None:
    """That takes minutes: the one that .ci/horovod keeps is taken."""
    torch = environment.run("-c", "import torch; print(torch.__version__)").split()[-1]
    tag = f"torch-{torch}-py{sys.version_info[0]}{sys.version_info[1]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nbtrain" / "wheels"
    found = [*cache.glob(f"horovod-*-{tag}/*.whl")]
    if not found:
        absent(f"no Horovod was compiled for {tag}", ".ci/horovod does it")
    environment.pip("install", str(found[0]), f"{environment.wheel}[horovod]")
    play(request.getfixturevalue("notebook"), "horovod")


def test_the_servers_extension_is_there(environment: Environment) -> None:
    environment.pip("install", f"{environment.wheel}[server]")
    shown = environment.run("-m", "jupyter", "server", "extension", "list")
    assert re.search(r"nbtrain\.watch\.server\s.*OK", shown), shown
