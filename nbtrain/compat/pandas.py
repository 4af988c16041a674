"""pandas' options, all at once: `pandas.get_option` warns of those that have gone out of use. pandas 1.5 to 3.1.

Nothing here imports pandas.
"""

from __future__ import annotations

import sys
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("pandas")
_CONFIG = "pandas._config.config"
its.members(_CONFIG, "_global_config", "_registered_options")


def options() -> dict[str, Any] | None:
    """The options that are not at their defaults; None where pandas is not loaded, or keeps them elsewhere."""
    config: Any = sys.modules.get(_CONFIG)
    known = getattr(config, "_registered_options", None)
    values = getattr(config, "_global_config", None)
    if known is None or values is None or not hasattr(sys.modules.get("pandas"), "set_option"):
        return None
    changed: dict[str, Any] = {}
    for name, option in known.items():
        value: Any = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not option.defval and value != option.defval:
            changed[name] = value
    return changed
