"""Two hosts on this machine: network namespaces behind a switch, with names, addresses and shared memory of their own.

with two_hosts() as (a, b):
    a.run([sys.executable, "-m", "http.server", "--bind", a.address])     # a Popen; reached from b, and from here
    b.cut()                                                               # its cable is out, until mend()
    a.limit(100)                                                          # Mbit/s, both ways
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.daemons import program
from tests.support.hygiene import alive, describe, gone_within

NAMES = ("node-a", "node-b")

_NETS = range(256)
"""x of 10.77.x.0/24: the first one for which this machine has no switch yet."""

_ENTER = 'mount --bind "$1" /dev/shm && hostname "$2" && shift 2 && exec "$@"'
"""In namespaces of the process's own for mounts and for its host's name."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host with an address, to which what is not in a host has a way, too."""

    name: str
    """What `hostname` says on it; both hosts know both names, and this machine does not."""
    address: str
    peers: tuple[str, ...]
    """Addresses of all that is on the switch without the host itself: this machine's first."""
    namespace: str
    switch: str
    """The namespace of the switch; the host's port has its name."""
    started: list[subprocess.Popen[Any]] = field(default_factory=list, repr=False, compare=False)

    @property
    def memory(self) -> Path:
        """What its processes see as /dev/shm. Not below it: tests beside this one look there for what is left."""
        return Path("/run") / self.namespace

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start it on this host; `options` are Popen's. Ended at the latest with the host."""
        ip = program("ip", "iproute2")  # wherever PATH of `options` leads
        within = [ip, "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _ENTER, "sh"]
        self.started.append(subprocess.Popen([*within, str(self.memory), self.name, *argv], **options))
        return self.started[-1]

    def cut(self) -> None:
        """The cable is out: what is sent is lost, and nobody is told."""
        _in(self.switch, "ip", "link", "set", self.name, "down")

    def mend(self) -> None:
        _in(self.switch, "ip", "link", "set", self.name, "up")

    def limit(self, mbit: float | None) -> None:
        """What the host may send, and what it may receive, in a second; None: as much as there is."""
        if mbit is not None and (reason := why_no_limit()):
            pytest.skip(reason)
        for namespace, device in ((self.namespace, "eth0"), (self.switch, self.name)):
            if mbit is not None:
                _in(namespace, "tc", "qdisc", "replace", "dev", device, "root", *_bucket(mbit))
            elif " tbf " in _in(namespace, "tc", "qdisc", "show", "dev", device):
                _in(namespace, "tc", "qdisc", "del", "dev", device, "root")

    def processes(self) -> list[psutil.Process]:
        """All that runs on it."""
        found = []
        for pid in _said("ip", "netns", "pids", self.namespace).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return [process for process in found if alive(process)]


@functools.cache
def why_not() -> str | None:
    """Why there are no two hosts here; None where there are."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.getuid() != 0:
        return "only root makes network namespaces"
    for needed in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(needed) is None:
            return f"no {needed}"
    try:
        with _hosts() as (a, _):
            assert a.run(["true"]).wait(10) == 0, "nothing runs in one"
            with suppress(ConnectionRefusedError):  # by the host, which is thereby reached
                socket.create_connection((a.address, 9), timeout=5).close()
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return f"network namespaces may not be made here: {error}"
    return None


@functools.cache
def why_no_limit() -> str | None:
    """Why a host's network can not be made slow; None where it can."""
    if shutil.which("tc") is None:
        return "no tc"
    try:
        with _hosts() as (a, _):
            _in(a.namespace, "tc", "qdisc", "replace", "dev", "eth0", "root", *_bucket(1))
    except (AssertionError, OSError) as error:
        return f"networks can not be limited here: {error}"
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """The test is left out where there are none. Everything is gone at the end, with what still runs on them."""
    program("ip", "iproute2")
    if reason := why_not():
        pytest.skip(reason)
    with _hosts() as hosts:
        yield hosts


@contextmanager
def _hosts() -> Iterator[tuple[Host, Host]]:
    with ExitStack() as made:
        net, switch = _new_switch()
        made.callback(_said, "ip", "netns", "del", switch)
        addresses = [f"10.77.{net}.{1 + at}" for at in range(1 + len(NAMES))]
        _in(switch, "ip", "link", "add", "switch", "up", "type", "bridge")
        _plug_in(switch, None, switch, "here", addresses[0])
        made.callback(_said, "ip", "link", "del", switch)  # its namespace's end removes it, but later
        hosts = []
        for name, address in zip(NAMES, addresses[1:], strict=True):
            peers = tuple(other for other in addresses if other != address)
            host = Host(name, address, peers, f"{switch}-{name}", switch)
            _said("ip", "netns", "add", host.namespace)
            made.callback(_remove, host)
            _plug_in(switch, host.namespace, "eth0", name, address)
            host.memory.mkdir()
            host.memory.chmod(0o1777)
            _names_file(host).parent.mkdir(parents=True)
            known = [f"{a} {n}\n" for a, n in zip(addresses[1:], NAMES, strict=True)]
            _names_file(host).write_text("".join(["127.0.0.1 localhost\n", *known]))
            hosts.append(host)
        yield hosts[0], hosts[1]


def _new_switch() -> tuple[int, str]:
    """The kernel refuses a name that there is: no two processes have the same one."""
    for net in _NETS:
        name = f"nbt-{net}"
        there = Path("/run/netns", name)
        if not there.exists():
            try:
                _said("ip", "netns", "add", name)
                return net, name
            except AssertionError:
                if not there.exists():  # no other process was quicker
                    raise
    raise AssertionError(f"there are {len(_NETS)} already")


def _plug_in(switch: str, namespace: str | None, device: str, port: str, address: str) -> None:
    """A cable between a port of the switch and a device of a host's, or of this machine's."""
    end = namespace or str(os.getpid())
    _in(switch, "ip", "link", "add", port, "type", "veth", "peer", "name", device, "netns", end)
    _in(switch, "ip", "link", "set", port, "master", "switch", "up")
    for line in (["addr", "add", f"{address}/24", "dev", device], ["link", "set", device, "up"]):
        _said("ip", *line) if namespace is None else _in(namespace, "ip", *line)
    if namespace is not None:
        _in(namespace, "ip", "link", "set", "lo", "up")


def _remove(host: Host) -> None:
    left = gone_within(5, lambda: _killed(host))
    for process in host.started:
        with suppress(BrokenPipeError), process:
            process.kill()
    shutil.rmtree(host.memory, ignore_errors=True)
    shutil.rmtree(_names_file(host).parent, ignore_errors=True)
    _said("ip", "netns", "del", host.namespace)
    assert not left, f"still on {host.name}: {'; '.join(left)}"


def _killed(host: Host) -> list[str]:
    left = host.processes()
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return [describe(process) for process in left]


def _names_file(host: Host) -> Path:
    """What `ip netns exec` shows as /etc/hosts."""
    return Path("/etc/netns", host.namespace, "hosts")


def _bucket(mbit: float) -> list[str]:
    return ["tbf", "rate", f"{int(mbit * 1e6)}bit", "burst", "128kb", "latency", "50ms"]


def _in(namespace: str, *argv: str) -> str:
    return _said("ip", "netns", "exec", namespace, *argv)


def _said(*argv: str) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}"
    return done.stdout
