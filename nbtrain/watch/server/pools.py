"""Finds the kernels of this user that have ranks by their records, asks them at their sockets, and watches them.

There is one connection to each kernel for all browsers, and none without a browser.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from nbtrain.watch.beacon.client import of_this_user
from nbtrain.watch.beacon.kernel_record import BeaconRecord, records

Message = dict[str, Any]

PATIENCE = 3.0
"""Seconds that a kernel may take to answer."""
QUICK = 1.0
"""The same for the list of all kernels: one that is busy in C code must not delay it long."""
LOOK = 1.0
"""Seconds between two looks for kernels that started or ended."""
LONGEST = 1 << 26
"""Bytes of one message, at most: all that is known of a run with very many ranks takes some millions."""

NOTHING: Message = {"notebook": "", "engine": "", "ranks": [], "state": "silent", "run": None}
"""What is known of a kernel that does not answer."""


class NoPool(Exception):
    """There is no such kernel, or it has no ranks."""


class NoAnswer(Exception):
    """The kernel exists and does not answer."""


class Viewer(Protocol):
    def take(self, message: str) -> None: ...


class Pools:
    """The pools that one server knows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._viewers: set[Viewer] = set()
        self._watches: dict[str, Watch] = {}
        self._looking: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        """set when a kernel may have started or ended"""

    async def abouts(self) -> list[Message]:
        records = await self._records()
        answers = await asyncio.gather(*map(self._about, records))
        return [answer for answer in answers if answer is not None]

    async def ask(self, kernel: str, request: Message) -> Message:
        record = await asyncio.to_thread(BeaconRecord.read, self._folder, kernel)
        if record is None or not record.alive:
            raise NoPool
        return await self._ask(record, request, PATIENCE)

    async def _about(self, record: BeaconRecord) -> Message | None:
        try:
            answer = await self._ask(record, {"command": "about"}, QUICK)
        except NoPool:
            return None
        except NoAnswer:
            answer = {}
        about: Message | None = answer.get("about")
        return about or {"kernel": record.kernel_id, "pid": record.pid, **NOTHING}

    async def _ask(self, record: BeaconRecord, request: Message, seconds: float) -> Message:
        async def asked() -> bytes:
            async with self.connection(record) as (reader, writer):
                writer.write(json.dumps(request).encode() + b"\n")
                return await reader.readline()

        try:
            line = await asyncio.wait_for(asked(), seconds)
            answer: Message = json.loads(line)
        except asyncio.TimeoutError:
            raise NoAnswer from None
        except (OSError, ValueError, RecursionError):  # the kernel ended meanwhile
            raise NoPool from None
        return answer

    @asynccontextmanager
    async def connection(
        self, record: BeaconRecord
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            reader, writer = await asyncio.open_unix_connection(record.socket, limit=LONGEST)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):  # nobody listens: its process has ended
                with suppress(OSError):
                    record.remove(self._folder)
            raise NoPool from None
        try:
            if not of_this_user(writer.get_extra_info("socket")):
                raise NoPool
            yield reader, writer
        finally:
            writer.close()

    async def _records(self) -> list[BeaconRecord]:
        return await asyncio.to_thread(lambda: list(records(self._folder)))  # the disk may be slow

    # -- watching ----------------------------------------------------------------------------

    def join(self, viewer: Viewer) -> None:
        """Send this viewer what is known of every kernel, and all messages from now on."""
        self._viewers.add(viewer)
        for watch in self._watches.values():
            if watch.about is not None:
                viewer.take(watch.about)
                watch.again(viewer)
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._keep_looking())

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        for watch in self._watches.values():
            watch.wanting.discard(viewer)
        if not self._viewers and self._looking is not None:
            self._looking.cancel()
            self._looking = None
            for watch in self._watches.values():
                watch.task.cancel()
            self._watches.clear()

    def again(self, viewer: Viewer, kernel: str) -> None:
        """Send everything again: the viewer has missed a message of this kernel's run."""
        if kernel in self._watches:
            self._watches[kernel].again(viewer)

    def tell(self, message: str, but: Set[Viewer] = frozenset()) -> None:
        for viewer in self._viewers - but:
            viewer.take(message)

    async def _keep_looking(self) -> None:
        while True:
            self._look.clear()
            there = {record.kernel_id: record for record in await self._records()}
            for kernel, watch in list(self._watches.items()):
                if there.get(kernel) != watch.record:
                    watch.task.cancel()
                    del self._watches[kernel]
                    if kernel not in there:
                        self.tell(json.dumps({"kernel": kernel, "gone": True}))
                elif watch.task.done():
                    del self._watches[kernel]
            for kernel, record in there.items():
                if kernel not in self._watches:
                    self._watches[kernel] = Watch(self, record)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK)

    def look(self) -> None:
        self._look.set()


class Watch:
    """The connection to one kernel, for all viewers."""

    def __init__(self, pools: Pools, record: BeaconRecord) -> None:
        self.record = record
        self.about: str | None = None
        """the last `about` message, as it was sent on"""
        self.wanting: set[Viewer] = set()
        """viewers that wait for everything, and get no other message before it"""
        self._pools = pools
        self._writer: asyncio.StreamWriter | None = None
        self.task = asyncio.ensure_future(self._follow())

    def again(self, viewer: Viewer) -> None:
        """Ask the kernel for everything; one answer serves all viewers that ask before it comes."""
        if self._writer is not None and not self.wanting:
            self._writer.write(b'{"command":"again"}\n')
        self.wanting.add(viewer)

    async def _follow(self) -> None:
        with suppress(NoPool, OSError, ValueError):  # ValueError: what it says is no JSON, or endless
            async with self._pools.connection(self.record) as (reader, writer):
                writer.write(b'{"command":"watch"}\n')
                self._writer = writer
                while line := await reader.readline():
                    self._pass_on(line.decode().rstrip())
        if self.about is not None:
            self._pools.look()

    def _pass_on(self, line: str) -> None:
        """Send a message on as text: a run's numbers need not be parsed here."""
        said, kernel = json.loads(line), json.dumps(self.record.kernel_id)
        if "about" in said:
            self.about = f'{{"kernel":{kernel},{line[1:]}'
            self._pools.tell(self.about)
            return
        if said.get("kind") == "all":
            self.wanting.clear()
        self._pools.tell(f'{{"kernel":{kernel},"message":{line}}}', but=self.wanting)
