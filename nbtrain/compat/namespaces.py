"""Names that IPython and torch's compiler put among a notebook's own. Nothing here imports either."""

from __future__ import annotations

EXIT_CODE = "_exit_code"
"""IPython keeps there what `!command` returned."""
KEPT_OF_CELLS = r"_|__|___|_\d+|_i\d*|_ii|_iii|_[oid]h|In|Out"
"""A pattern: what was shown and what was typed."""
LISTS_OF_CELLS = frozenset(("In", "Out", "_ih", "_oh"))
"""Those of them that hold one for each cell."""
OF_IPYTHON = rf"{KEPT_OF_CELLS}|{EXIT_CODE}|get_ipython"
"""A pattern: the same, and how to ask."""
OF_COMPILER = (
    r"__(compiled_fn|resume_at|import|builtins_dict|gen_rand_values|warnings_warn_wrapper|dtensor_spec)_\w*|___\w+"
)
"""A pattern: torch writes what it compiles for a function into that function's globals."""
