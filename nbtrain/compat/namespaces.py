"""Names that IPython and torch's compiler put among a notebook's own. Nothing here imports either."""

from __future__ import annotations

EXIT_CODE = "_exit_code"
"""IPython keeps there what `!command` returned."""
OF_IPYTHON = rf"_|__|___|_\d+|_i\d*|_ii|_iii|_[oid]h|{EXIT_CODE}|In|Out|get_ipython"
"""A pattern: what was shown and what was typed, and how to ask."""
OF_COMPILER = (
    r"__(compiled_fn|resume_at|import|builtins_dict|gen_rand_values|warnings_warn_wrapper|dtensor_spec)_\w*|___\w+"
)
"""A pattern: torch writes what it compiles for a function into that function's globals."""
