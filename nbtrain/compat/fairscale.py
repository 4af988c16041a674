"""fairscale."""

from __future__ import annotations

from nbtrain.compat.internals import Internals

its = Internals("fairscale")
check = its.check
