"""xla."""

from __future__ import annotations

from nbtrain.compat.internals import Internals

its = Internals("xla")
check = its.check
