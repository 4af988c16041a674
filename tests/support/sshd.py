"""A real sshd on this machine, under the names of two.

with running_sshd(folder, PYTHONPATH=...) as sshd:      # what commands find in their environment
    subprocess.run(["ssh", "node-a", "echo hello"], env=os.environ | sshd.environment)
    sshd.run("node-b", "echo hello")                    # the same, and what it printed
"""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemons import daemons, free_ports, program
from tests.support.hygiene import SESSION

NAMES = ("node-a", "node-b")
"""Both are this machine; a command finds its own in NODE."""

NODE = "NBTRAIN_TEST_NODE"

_KEPT = (SESSION, "TMPDIR", "XDG_RUNTIME_DIR", "NBTRAIN_HISTORY")
"""Of the test's own environment: what commands leave behind is seen. A login has nothing else of it."""

_SERVER = """\
ListenAddress 127.0.0.1:{port}
HostKey "{folder}/host_key"
AuthorizedKeysFile "{folder}/key.pub"
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
AcceptEnv {node}
SetEnv {environment}
"""

_CLIENT = """\
Host {name}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile "{folder}/key"
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile "{folder}/known_hosts"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking no
    BatchMode yes
    LogLevel ERROR
    SetEnv {node}={name}
"""

_NOBODY = f"Host * {' '.join(f'!{name}' for name in NAMES)}\n    ProxyCommand false\n"
"""No other host is looked for."""


@dataclass(frozen=True, slots=True)
class Sshd:
    """An sshd that serves this user."""

    folder: Path
    port: int

    @property
    def config(self) -> Path:
        """For `ssh -F`."""
        return self.folder / "config"

    @property
    def environment(self) -> dict[str, str]:
        """On top of a process's own: its `ssh` knows both names, and asks for nothing."""
        return {"PATH": os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", os.defpath)])}

    def run(self, name: str, command: str, timeout: float = 30) -> str:
        """What the command prints there; an error is raised if it fails."""
        start = [str(self.folder / "bin" / "ssh"), name, command]
        done = subprocess.run(start, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def running_sshd(folder: Path, **environment: str) -> Iterator[Sshd]:
    """Ready when this yields, with keys of its own in `folder`; ends with all that was started through it."""
    sshd, ssh = program("sshd", "openssh-server"), program("ssh", "openssh-client")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where root's sshd locks in what has not logged in yet
    for key in ("host_key", "key"):
        make = [program("ssh-keygen", "openssh-client"), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)
    (port,) = free_ports(1)
    found, user = Sshd(folder, port), getpass.getuser()
    clients = (_CLIENT.format(name=name, port=port, user=user, folder=folder, node=NODE) for name in NAMES)
    found.config.write_text("".join([*clients, _NOBODY]))
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec "{ssh}" -F "{found.config}" "$@"\n')
    wrapper.chmod(0o755)
    with daemons(folder) as started:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        wanted = " ".join(_quoted(f"{k}={v}") for k, v in (kept | started.environment | environment).items())
        (folder / "sshd_config").write_text(_SERVER.format(port=port, folder=folder, node=NODE, environment=wanted))
        started.start("sshd", sshd, "-D", "-e", "-f", str(folder / "sshd_config"))
        started.wait_until(lambda: _answers(port))
        yield found


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
