"""Ranks on machines that ssh leads to: `--engine ssh --hosts a,b`. On each a node is started by one `ssh`, which gets
the ticket on its standard input, where no list of processes shows it.

A node needs its ssh to be started and to be ended, and for nothing else: where that connection drops, the run goes on.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection

from nbtrain.annexes.machines.start_there import Child, end, python_there, shown, why_ended
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import MachinesWanted
from nbtrain.engines.remote.lobby import HOUR
from nbtrain.engines.remote.machines import MACHINE
from nbtrain.engines.remote.pool import RemotePool

SSH = ("ssh", "-x", "-a", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""Nobody is there to be asked for a password, and a machine that is off is to be noticed."""
NOT_REACHED = 255
"""what ssh itself ends with"""
GRACE = 1.5
"""Seconds in which nodes end by themselves; what they have been told reaches them without ssh, too."""
END = "end"
"""the line upon which a shell there ends its node"""


class SshDoor:
    """A child process for each host."""

    lasts = HOUR

    def __init__(self, wanted: MachinesWanted) -> None:
        hosts = wanted.hosts
        if not hosts:
            raise UsageError("--engine ssh needs --hosts node1,node2: names of the machines, as ssh knows them")
        if twice := [host for at, host in enumerate(hosts) if host in hosts[:at]]:
            raise UsageError(
                f"--hosts names {twice[0]} twice; each machine has one node, with as many ranks as --devices"
            )
        if wanted.nodes is not None and wanted.nodes > len(hosts):
            raise UsageError(
                f"--nodes {wanted.nodes} is more than --hosts names: {len(hosts)}. Leave --nodes out, or name more"
            )
        if shutil.which("ssh") is None:
            raise UsageError("--engine ssh: there is no ssh on this machine (package openssh-client)")
        self.hosts = hosts[: wanted.most or wanted.nodes]
        self._python = wanted.python
        self._ticket = ""
        self._children: dict[str, Child] = {}
        self._old: set[str] = set()
        """hosts whose node was lost while its ssh still ran: it is about to end, and then another is started"""

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    def open(self, ticket: str, there: Collection[str]) -> None:
        self._ticket = ticket
        self._old.clear()
        for host in self._lacking(there):
            if host in self._children and self._children[host].status is None:
                self._old.add(host)
            else:
                self._start(host)

    def _lacking(self, there: Collection[str]) -> list[str]:
        return [host for host in self.hosts if host not in there]

    def _start(self, host: str) -> None:
        self._children[host] = child = Child([*SSH, "--", host, _command(host, self._python)])
        child.write(self._ticket)

    def trouble(self, there: Collection[str]) -> str | None:
        for host in self._lacking(there):
            status = self._children[host].status
            if status is None:
                continue
            if host in self._old:
                self._old.discard(host)
                self._start(host)
                continue
            lines = list(self._children[host].lines)
            if status == NOT_REACHED:
                return f"{host}: ssh does not lead there. `ssh -o BatchMode=yes {host}` has to work{shown(lines)}"
            return why_ended(host, status, lines)
        return None

    def waiting(self, there: Collection[str]) -> str:
        said = {host: child.complaint for host, child in self._children.items()}
        return ", ".join(
            f"{host} ({said[host]})" if said.get(host) else host for host in self._lacking(there)
        )  # fmt: skip

    def close(self) -> None:
        children = list(self._children.values())
        self._children.clear()
        for child in children:
            child.write(END)
        end(children, GRACE)


def _command(host: str, python: str) -> str:
    """What is run there. The first line that it reads is the ticket. After that it waits for `end`; the end of its
    input says only that the connection has dropped."""
    script = "; ".join((
        "IFS= read -r NBTRAIN_TICKET || exit 0",
        f"export NBTRAIN_TICKET {MACHINE}={shlex.quote(host)}",
        python_there(python),
        "exec 3<&0",
        '{ "$p" -m nbtrain node </dev/null 3<&- & } ',
        "node=$!",
        f'{{ while IFS= read -r word; do if [ "$word" = {END} ]; then kill "$node"; fi; done; }} <&3 >/dev/null 2>&1 & '
        "reader=$!",
        'wait "$node"',
        "status=$?",
        'kill "$reader" 2>/dev/null',
        'exit "$status"',
    ))  # fmt: skip
    return f"exec sh -c {shlex.quote(script)}"


class SshPool(RemotePool):
    """A node on each host."""

    door = SshDoor
