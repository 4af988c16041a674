"""Names that IPython and torch's compiler put among a notebook's own. Nothing here imports either."""

from __future__ import annotations

EXIT_CODE = "_exit_code"
"""where IPython keeps the exit code of `!command`"""
KEPT_OF_CELLS = r"_|__|___|_\d+|_i\d*|_ii|_iii|_[oid]h|In|Out"
"""a pattern for the names of what cells showed and what was typed"""
LISTS_OF_CELLS = frozenset(("In", "Out", "_ih", "_oh"))
"""those of them that hold an entry for each cell"""
ALSO_AS = {"In": "_ih", "Out": "_oh"}
"""those of them that people give to classes of theirs → under which IPython has the same object"""
OF_IPYTHON = rf"{KEPT_OF_CELLS}|{EXIT_CODE}|get_ipython"
"""a pattern for all names that IPython binds"""
OF_COMPILER = (
    r"__(compiled_fn|resume_at|import|builtins_dict|gen_rand_values|warnings_warn_wrapper|dtensor_spec)_\w*|___\w+"
)
"""a pattern for the names that torch's compiler binds in the globals of a function that it compiles"""
