"""`%distributed join`: how another machine takes part."""

from __future__ import annotations

import time

from nbtrain.errors import UsageError
from nbtrain.magics.line.parse import Request
from nbtrain.magics.state import MagicsState


def join(state: MagicsState, request: Request) -> str:
    from nbtrain.engines.remote.doors import join_line
    from nbtrain.engines.remote.lobby import HOUR, lobby  # on use: most notebooks stay on one machine
    from nbtrain.engines.remote.machines import differences

    if words := request.words[1:]:
        raise UsageError(f"join stands alone: what is {words[0].plain!r} there for?")
    here = lobby()
    until = time.strftime("%H:%M", time.localtime(time.time() + HOUR))
    lines = [
        f"on each machine, with the same packages installed, until {until}:",
        "",
        f"  {join_line(here)}",
        "",
        "Whoever has this line can run code as you: keep it as a password. Then, in a cell:",
        "  %%distributed --engine elastic --nodes 2 --devices 4",
    ]
    machines = [peer.machine for peer in here.machines()]
    if machines:
        lines += ["", "joined so far:", *(f"  {one}" for one in machines), *differences(machines)]
    return "\n".join(lines)
