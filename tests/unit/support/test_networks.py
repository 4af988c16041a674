"""Two hosts behind a switch: names, addresses, cables that are out, and that nothing of them is left."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import networks
from tests.support.networks import Host, two_hosts, why_no_limit

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    connection, (peer, _) = server.accept()
    count = 0
    while data := connection.recv(1 << 20):
        count += len(data)
    print(peer, count)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


def told(host: Host, *argv: str) -> str:
    said: str = host.run(argv, stdout=subprocess.PIPE, text=True).communicate(timeout=20)[0]
    return said.strip()


def sent(a: Host, b: Host, size: int) -> float:
    """The seconds that so many bytes take from b to a, which knows b by its address."""
    server = a.run([sys.executable, "-c", LISTEN, a.address], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    assert server.stdout.readline() == "listening\n"
    start = time.monotonic()
    assert b.run([sys.executable, "-c", SEND, a.name, str(size)]).wait(30) == 0
    assert server.communicate(timeout=30)[0].split() == [b.address, str(size)]
    return time.monotonic() - start


def refused(host: Host, timeout: float = 5) -> bool:
    """From here: by the host itself, which is thereby reached."""
    try:
        socket.create_connection((host.address, 9), timeout=timeout).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    raise AssertionError("somebody listens there")


def test_hosts_have_names_addresses_and_memory_of_their_own(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    assert [told(host, "hostname") for host in hosts] == ["node-a", "node-b"]
    assert told(a, "getent", "hosts", "node-b").split() == [b.address, "node-b"]
    assert told(a, "hostname", "-i") == a.address
    told(a, "touch", "/dev/shm/of-a")
    assert (told(a, "ls", "/dev/shm"), told(b, "ls", "/dev/shm")) == ("of-a", "")
    assert socket.gethostname() not in ("node-a", "node-b")
    assert a.peers == (b.peers[0], b.address)


def test_they_reach_each_other_and_are_reached_from_here(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    sent(a, b, 1000)
    sent(b, a, 1000)
    assert refused(a)
    assert refused(b)
    with socket.create_server((a.peers[0], 0)) as server:
        server.settimeout(10)
        line = f"import socket; socket.create_connection({server.getsockname()!r}).close()"
        assert a.run([sys.executable, "-c", line]).wait(10) == 0
        connection, (peer, _) = server.accept()
        connection.close()
        assert peer == a.address


def test_a_cable_is_out_until_it_is_back(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    a.cut()
    assert not refused(a, timeout=0.5)
    assert refused(b)
    a.mend()
    assert refused(a)


def test_a_network_is_slow_until_it_is_not(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    if reason := why_no_limit():
        pytest.skip(reason)
    for host in hosts:
        host.limit(20)
        assert sent(a, b, 2_000_000) > 0.5  # 16 Mbit
        host.limit(None)
        host.limit(None)
    assert sent(a, b, 2_000_000) < 0.5


def test_what_still_runs_ends_with_the_hosts_also_after_a_failure() -> None:
    def fails() -> None:
        with two_hosts() as (a, b):
            left.append(a.run(["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"], stdout=subprocess.PIPE))
            hosts.extend([a, b])
            raise ZeroDivisionError

    left: list[subprocess.Popen[bytes]] = []
    hosts: list[Host] = []
    with pytest.raises(ZeroDivisionError):
        fails()
    assert left[0].returncode == -9
    for host in hosts:
        assert not Path("/run/netns", host.namespace).exists()
        assert not Path("/etc/netns", host.namespace).exists()
        assert not host.memory.exists()
        assert not Path("/run/netns", host.switch).exists()
        assert not Path("/sys/class/net", host.switch).exists()


def test_several_tests_have_networks_of_their_own(hosts: tuple[Host, Host]) -> None:
    with two_hosts() as others:
        assert len({host.address for host in (*hosts, *others)}) == 4
        sent(*others, 1000)
        line = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=1)"
        asked = others[0].run([sys.executable, "-c", line, hosts[0].address], stderr=subprocess.PIPE, text=True)
        assert "Network is unreachable" in asked.communicate(timeout=10)[1]


def test_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks.os, "getuid", lambda: 1000)
    assert networks.why_not.__wrapped__() == "only root makes network namespaces"


def test_what_the_kernel_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*argv: str) -> str:
        raise AssertionError(f"{' '.join(argv)}: Operation not permitted")

    monkeypatch.setattr(networks, "_said", refuses)
    monkeypatch.setattr(networks.os, "getuid", lambda: 0)
    said = networks.why_not.__wrapped__()
    assert said is not None
    assert re.search(r"may not be made here: ip netns add nbt-\d+: Operation not permitted", said)
