"""The server extension, in a Jupyter Server of its own: who may see and do what, and what he is shown.

The kernels are beacons in the test's process; the feed of their run is a real one.
"""

from __future__ import annotations

import asyncio
import http.client
import http.cookiejar
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websocket

from nbtrain.base.events import Metrics
from nbtrain.watch.beacon import Beacon
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.server import pools
from nbtrain.watch.server.handlers import shows_notebooks
from tests.support.gate import ALLOWED
from tests.support.kernels import ROOT, private_environment, private_home

KERNEL = "3f0c1c2e-8a54-4a55-9d5e-0b1d6b1f7a11"
BASE = "/user/a%40b/"
EVERYTHING = "read nbtrain\nexecute nbtrain\nread csp\nwrite csp\n"
API = "nbtrain/api/pools"
UNSENT = 30
"""Messages that this server lets a browser leave unread."""
START = f"""
import nbtrain.watch.server.handlers, jupyter_server.serverapp
nbtrain.watch.server.handlers.UNSENT = {UNSENT}
jupyter_server.serverapp.main()
"""
MANY = 120
"""Messages of 50 kB, more than it and all the buffers on the way take."""
RUN = {"id": "r1", "cell": 3, "summary": "", "strategy": "ddp", "devices": ["cpu"], "began": 0.0, "kernel": KERNEL}


@dataclass(frozen=True)
class Answer:
    code: int
    text: str
    headers: Any

    @property
    def data(self) -> Any:
        return json.loads(self.text)


class Straight(urllib.request.HTTPRedirectHandler):
    """To be sent to the log-in page is an answer too."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    runtime: Path
    allowed: Path

    def ask(self, path: str, body: Any = None, token: str | None = "", opener: Any = None, **headers: str) -> Answer:
        """`token`: None for nobody, empty for the right one."""
        if token is not None:
            headers["Authorization"] = f"token {token or self.token}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with (opener or urllib.request.build_opener(Straight)).open(request, timeout=20) as answer:
                return Answer(answer.status, answer.read().decode(), answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read().decode(), error.headers)

    def stream(self, token: str = "", **options: Any) -> websocket.WebSocket:
        header = [f"Authorization: token {token or self.token}"]
        url = self.url.replace("http", "ws") + "nbtrain/api/stream"
        return websocket.create_connection(url, timeout=20, header=header, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """It finds the extension as an installed one is found: by the file in its configuration."""
    with private_home() as home, open(home / "log", "w+") as log, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, token = probe.getsockname()[1], secrets.token_hex(16)
        probe.close()
        config = home / "config" / "jupyter_server_config.d"
        config.mkdir(parents=True)
        (config / "nbtrain.json").write_bytes((ROOT / "jupyter-config" / config.name / "nbtrain.json").read_bytes())
        (home / "allowed").write_text(EVERYTHING)
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", START, "--no-browser", "--allow-root", "--ip=127.0.0.1"),
                *(f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={home}"),
                *(f"--ServerApp.base_url={BASE}", f"--IdentityProvider.token={token}"),
                "--ServerApp.authorizer_class=tests.support.gate.Gate",
            ],
            env=private_environment(home) | {ALLOWED: str(home / "allowed")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        found = Server(f"http://127.0.0.1:{port}{BASE}", token, home / "runtime", home / "allowed")
        try:
            deadline = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(OSError):
                    found.ask("api/status")
                    break
                time.sleep(0.05)
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
        log.seek(0)
        said = log.read()
        assert "nbtrain: the ranks of all notebooks are at /user/a%40b/nbtrain" in said
        assert not re.search(
            r"Uncaught|Unhandled|AuthWarning|Task was destroyed|never retrieved|never awaited", said
        ), said


class Scene:
    """A kernel with ranks, and what it was asked."""

    def __init__(self, directory: Path, kernel: str = KERNEL) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self.done: list[str] = []
        self.run = Feed(RUN)
        self.run.opened("ddp · 1 rank")
        self.beacon = Beacon(kernel, directory, lambda: {"engine": "local", "state": "idle"}, self.do)

    def do(self, command: str, run: str | None) -> tuple[bool, str]:
        if run not in (None, "r"):
            return False, "This run is over."
        self.done.append(command)
        return True, f"{command} it is"

    def speak(self, step: int) -> None:
        self.run.receive(Metrics(rank=0, time=float(step), points={"loss": [(step, 0.5)]}))
        self.run.tick(float(step))

    @property
    def watchers(self) -> int:
        return len(self.run._callbacks)


@pytest.fixture
def scene(server: Server) -> Iterator[Scene]:
    found = Scene(server.runtime)
    yield found
    found.beacon.close()


def following(scene: Scene) -> Scene:
    scene.beacon.follow(scene.run)
    return scene


def hear(stream: websocket.WebSocket) -> Any:
    return json.loads(stream.recv())


@contextmanager
def streaming(server: Server, **options: Any) -> Iterator[websocket.WebSocket]:
    stream = server.stream(**options)
    try:
        yield stream
    finally:
        stream.close(timeout=1)
        stream.shutdown()  # where the other side has closed it, the former does not


def until(condition: Callable[[], object], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what is shown and done ----------------------------------------------------------------


def test_kernels_are_listed_asked_and_told(server: Server, scene: Scene) -> None:
    assert server.ask(API).data == [{"kernel": KERNEL, "pid": os.getpid(), "engine": "local", "state": "idle"}]
    assert server.ask(f"{API}/{KERNEL}/run").code == 404
    following(scene).speak(1)
    run = server.ask(f"{API}/{KERNEL}/run")
    assert run.headers["Content-Type"] == "application/json"
    assert (run.data["kind"], run.data["run"]["summary"]) == ("all", "ddp · 1 rank")
    for command in ("stop", "stacks", "kill"):
        assert server.ask(f"{API}/{KERNEL}/command", {"command": command, "id": "1"}).data == {
            "ok": True,
            "text": f"{command} it is",
        }
    assert scene.done == ["stop", "stacks", "kill"]


def test_a_command_for_another_run_is_refused(server: Server, scene: Scene) -> None:
    """The kernel has been restarted, or runs another cell by now: a page that has not heard of it must not end that."""
    command = f"{API}/{KERNEL}/command"
    assert server.ask(command, {"command": "stop", "run": "before"}).data == {"ok": False, "text": "This run is over."}
    assert scene.done == []
    assert server.ask(command, {"command": "stop", "run": "r"}).data["ok"]
    for run in ({"a": 1}, 7, "../x", "x" * 101):
        assert server.ask(command, {"command": "stop", "run": run}).code == 400
    assert scene.done == ["stop"]


def test_a_browser_is_sent_the_run(server: Server, scene: Scene) -> None:
    with streaming(server) as stream:
        assert hear(stream)["about"]["state"] == "idle"
        following(scene)
        first = hear(stream)
        assert (first["kernel"], first["message"]["kind"]) == (KERNEL, "all")
        scene.speak(1)
        news = hear(stream)["message"]
        assert (news["seq"], news["points"]) == (first["message"]["seq"] + 1, {"metric/loss/0": [[1], [0.5]]})
        stream.send(json.dumps({"again": KERNEL}))
        again = hear(stream)["message"]
        assert (again["kind"], again["seq"]) == ("all", news["seq"])
        scene.beacon.close()
        assert hear(stream) == {"kernel": KERNEL, "gone": True}
        late = Scene(server.runtime, "another-kernel")
        assert hear(stream)["kernel"] == "another-kernel"
        late.beacon.close()


def test_many_browsers_share_one_connection_and_none_is_left(server: Server, scene: Scene) -> None:
    following(scene)
    with streaming(server) as first:
        assert "about" in hear(first)
        assert hear(first)["message"]["kind"] == "all"
        with streaming(server) as second:
            assert "about" in hear(second)
            assert hear(second)["message"]["kind"] == "all"
            assert hear(first)["message"]["kind"] == "all"
            for step in range(1, 4):
                scene.speak(step)
            assert [hear(stream)["message"]["seq"] for stream in (first, second, first, second)] == [1, 1, 2, 2]
            assert len(scene.beacon._clients) == 1
            assert scene.watchers == 1
    until(lambda: not scene.watchers and not scene.beacon._clients)


@pytest.mark.slow
def test_a_browser_that_does_not_read_is_dropped(server: Server, scene: Scene) -> None:
    run = Talker()
    scene.beacon.follow(run)
    small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
    with streaming(server, sockopt=small) as sleeper, streaming(server) as reader:
        for seq in range(1, MANY):
            run.speak(seq)
            while (message := hear(reader).get("message", {})).get("seq") != seq:
                assert message.get("kind") != "news"
        sleeper.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        heard = 0
        with suppress(websocket.WebSocketConnectionClosedException, ConnectionError):
            while sleeper.recv_data()[0] != websocket.ABNF.OPCODE_CLOSE:
                heard += 1
        assert heard < MANY
    with streaming(server) as late:
        while (message := hear(late).get("message", {})).get("kind") != "all":
            pass
        assert message["seq"] == MANY - 1


class Talker:
    """A run that has a lot to say."""

    def __init__(self) -> None:
        self._seq = 0
        self._told: list[Callable[[Any], None]] = []

    def everything(self) -> dict[str, Any]:
        return {"kind": "all", "seq": self._seq}

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        self._told.append(callback)
        return lambda: self._told.remove(callback)

    def speak(self, seq: int) -> None:
        self._seq = seq
        for callback in list(self._told):
            callback({"kind": "news", "seq": seq, "text": "x" * 50_000})


@pytest.mark.slow
def test_a_kernel_that_is_stuck_is_listed_and_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere(server.runtime) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until its last thread has stopped: one more may answer till then
        (found,) = server.ask(API).data
        assert (found["kernel"], found["pid"], found["state"]) == ("another", process.pid, "silent")
        monkeypatch.setattr(pools, "PATIENCE", 0.1)
        mine = pools.Pools(server.runtime / "nbtrain")
        with pytest.raises(pools.NoAnswer):
            asyncio.run(mine.ask("another", {"command": "stop"}))
        process.send_signal(signal.SIGCONT)
        until(lambda: server.ask(API).data[0]["state"] == "idle")
    assert server.ask(API).data == []  # nor is a page told later that this one, of which it has not heard, has gone


@contextmanager
def elsewhere(runtime: Path) -> Iterator[subprocess.Popen[str]]:
    """A kernel in another process."""
    runtime.mkdir(mode=0o700, exist_ok=True)
    code = """
import sys, time
from pathlib import Path
from nbtrain.watch.beacon import Beacon
about = {"notebook": "", "engine": "local", "ranks": [], "state": "idle", "run": None}
beacon = Beacon("another", Path(sys.argv[1]), lambda: about, lambda command, run: (True, ""))
print("ready", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(runtime)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


# -- who may see it ------------------------------------------------------------------------

PAGE = ("nbtrain", "nbtrain/", "nbtrain/static/page.js", "nbtrain/static/page.css")
READ = (API, f"{API}/{KERNEL}/run", "nbtrain/api/runs")


def test_nobody_is_shown_or_does_anything(server: Server, scene: Scene) -> None:
    following(scene)
    for token in (None, "wrong"):
        for path in PAGE:
            answer = server.ask(path, token=token)
            assert (answer.code, "/user/a%40b/login?" in answer.headers["Location"]) == (302, True)
        for path in READ:
            assert server.ask(path, token=token).code == 403
        assert server.ask(f"{API}/{KERNEL}/command", {"command": "kill"}, token=token).code == 403
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        server.stream("wrong")
    assert refused.value.status_code == 403
    assert scene.done == []


@pytest.mark.parametrize(("allowed", "may_read", "may_act"), [
    ("", False, False),
    ("read kernels\nexecute kernels\nwrite nbtrain", False, False),
    ("read nbtrain", True, False),
    ("execute nbtrain", False, True),
])  # fmt: skip
def test_the_servers_authorizer_decides(
    server: Server, scene: Scene, allowed: str, may_read: bool, may_act: bool
) -> None:
    following(scene)
    server.allowed.write_text(allowed)
    try:
        for path in (*PAGE, *READ):
            assert server.ask(path).code == (200 if may_read else 403)
        request = urllib.request.Request(server.url + PAGE[-1], method="HEAD")
        request.add_header("Authorization", f"token {server.token}")
        with suppress(urllib.error.HTTPError) as _, urllib.request.urlopen(request) as answer:
            assert (answer.status, may_read) == (200, True)
        assert server.ask(f"{API}/{KERNEL}/command", {"command": "stop"}).code == (200 if may_act else 403)
        assert scene.done == ["stop"] * may_act
        if may_read:
            with streaming(server) as stream:
                heard = hear(stream)
                while heard.get("gone"):  # the kernel of the test before
                    heard = hear(stream)
                assert "about" in heard
        else:
            with pytest.raises(websocket.WebSocketBadStatusException) as refused:
                server.stream()
            assert refused.value.status_code == 403
    finally:
        server.allowed.write_text(EVERYTHING)


def test_another_sites_page_can_do_nothing(server: Server, scene: Scene) -> None:
    """A browser sends the cookie along wherever a request comes from."""
    jar = http.cookiejar.CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    assert server.ask(f"nbtrain?token={server.token}", token=None, opener=browser).code == 200
    path, stop = f"{API}/{KERNEL}/command", {"command": "stop"}
    assert server.ask(path, stop, token=None, opener=browser).code == 403
    assert server.ask(path, stop, token=None, opener=browser, **{"X-XSRFToken": "guessed"}).code == 403
    assert scene.done == []
    known = next(cookie.value for cookie in jar if cookie.name == "_xsrf")
    own = {"X-XSRFToken": str(known), "Origin": server.url.partition("/user")[0]}
    assert server.ask(path, stop, token=None, opener=browser, **own).data["ok"]
    cookie = "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)
    url = server.url.replace("http", "ws") + "nbtrain/api/stream"
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        websocket.create_connection(url, timeout=20, cookie=cookie, origin="http://evil.example")
    assert refused.value.status_code == 403
    stream = websocket.create_connection(url, timeout=20, cookie=cookie, origin=own["Origin"])
    assert "about" in hear(stream)
    stream.close()


# -- what cannot be asked ------------------------------------------------------------------


OWN = pytest.param(str(os.getpid()), id="a process number")


@pytest.mark.parametrize(
    "kernel", ["unknown", "..", "%2e%2e", "a%2Fb", "a/b", ".", "a.json", "-", "x" * 101, "", "%00", "%0a", OWN]
)
def test_what_is_no_kernel_is_not_found(server: Server, scene: Scene, kernel: str) -> None:
    assert server.ask(f"{API}/{kernel}/run").code == 404
    assert server.ask(f"{API}/{kernel}/command", {"command": "stop"}).code == 404


@pytest.mark.parametrize("body", [
    {"command": "exec"}, {"command": ["stop"]}, {"command": {"stop": 1}}, {}, [], "stop", 7, b"{", b"\xff",
    {"pid": 1}, {"command": "weights"},
])  # fmt: skip
def test_what_is_no_command_is_refused(server: Server, scene: Scene, body: Any) -> None:
    assert server.ask(f"{API}/{KERNEL}/command", body).code == 400
    assert scene.done == []


@pytest.mark.parametrize("said", ["{}", "x", "[]", '{"again": 1}', '{"again": "../x"}', '{"command": "stop"}'])
def test_a_browser_that_says_something_else_is_sent_away(server: Server, scene: Scene, said: str) -> None:
    with streaming(server) as stream:
        stream.send(said)
        while (received := stream.recv_data())[0] != websocket.ABNF.OPCODE_CLOSE:
            pass
        assert received[1][:2] == (1008).to_bytes(2, "big")


# -- the page ------------------------------------------------------------------------------


def test_the_page_knows_where_it_is_and_takes_nothing_from_elsewhere(server: Server) -> None:
    page = server.ask("nbtrain")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    config = re.search(r'<script id="jupyter-config-data" type="application/json">(.*?)</script>', page.text)
    assert json.loads(config[1]) == {"baseUrl": BASE, "opens": "lab/tree/"}
    policy = page.headers["Content-Security-Policy"]
    for part in ("frame-ancestors 'self'", "default-src 'none'", "script-src 'self'", "base-uri 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    addresses = re.findall(r'(?:src|href)="(.*?)"', page.text)
    assert sorted(addresses) == [f"{BASE}nbtrain/static/page.css", f"{BASE}nbtrain/static/page.js", "data:,"]
    types = {"page.js": "text/javascript", "page.css": "text/css"}
    for name, kind in types.items():
        answer = server.ask(f"nbtrain/static/{name}")
        assert (answer.code, answer.headers["Content-Type"], answer.headers["Cache-Control"]) == (200, kind, "no-cache")
    for name in ("..", "../server/pools.py", "..%2fserver%2fpools.py", "%2e%2e", "x.js", "/etc/passwd"):
        assert server.ask(f"nbtrain/static/{name}").code in (403, 404)


@pytest.mark.parametrize(("default_url", "opens"), [
    *((page, "lab/tree/") for page in ("/lab", "/lab/tree/work", "/lab/workspaces/tree", "/", "")),
    *((page, "notebooks/") for page in ("/tree", "/tree/work", "/notebooks/a.ipynb")),
])  # fmt: skip
def test_notebooks_are_opened_where_the_servers_first_page_is(default_url: str, opens: str) -> None:
    assert shows_notebooks(default_url) == opens
