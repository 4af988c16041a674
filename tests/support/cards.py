"""Tables of cells that are written for CPU ranks, played on a GPU: `ON_CARDS=1`, as `make gpu` has it."""

from __future__ import annotations

import os

ON_CARDS = os.environ.get("ON_CARDS") == "1"
CARDS = "--accelerator cuda --oversubscribe" if ON_CARDS else ""
"""Flags of `%%distributed`: all ranks on the cards that are there, several on one where they are fewer."""
