"""A ticket is one line, and what is wrong with one is said in a sentence."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from nbtrain.base.errors import UsageError
from nbtrain.engines.remote import join_message
from nbtrain.engines.remote.machines import this_machine
from nbtrain.engines.remote.protocol import Join
from nbtrain.engines.remote.ticket import Ticket
from nbtrain.machine.gpus import Gpu, GpuUser

TICKET = Ticket("pool", ("10.0.0.1", "127.0.0.1"), 4711, "k" * 40, "p" * 40, "s" * 40, round(time.time() + 3600 * 24))


def test_a_ticket_comes_back_from_its_text_also_where_a_terminal_broke_the_line() -> None:
    text = TICKET.text()
    assert len(text.split()) == 1
    assert Ticket.read(text) == TICKET
    assert Ticket.read(f"  {text[:50]}\n{text[50:]}\n") == TICKET


def test_the_first_words_of_a_machine_come_back_from_json() -> None:
    machine = this_machine("10.0.0.2", "10.0.0.1", 4712)
    cards = (Gpu(index=0, uuid="GPU-a", name="card", users=(GpuUser(pid=3), GpuUser(pid=4, memory=7))),)
    here = replace(machine.here, gpus=cards, visible="0", leases=Path("/there"))
    for join in (Join(machine=machine), Join(machine=replace(machine, here=here))):
        assert join_message.read(join_message.written(join)) == join


def test_its_secret_is_not_shown() -> None:
    assert "s" * 40 not in repr(TICKET)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "this is none: a ticket begins with nbtrain-1-"),
        ("nbtrain-2-abc", "another version's"),
        (TICKET.text()[:60], "damaged, or not whole"),
        (TICKET.text()[:40] + "x" + TICKET.text()[41:], "damaged, or not whole"),
        (replace(TICKET, expires=0.0).text(), "has expired"),
        ("", "a ticket begins with"),
    ],
    ids=["no ticket", "another version", "cut", "a letter replaced", "expired", "nothing"],  # no time in a name
)
def test_what_is_none_is_said(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Ticket.read(text)
