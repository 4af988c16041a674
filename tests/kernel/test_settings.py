"""Settings of Python and of libraries follow the notebook, and never lead it."""

from __future__ import annotations

import pytest

from tests.support.notebook import Notebook
from tests.support.story import notebook, play, warm_ranks  # noqa: F401


@pytest.mark.thorough
def test_settings_of_python_and_of_libraries_follow_and_never_lead(notebook: Notebook) -> None:  # noqa: F811
    play(
        notebook,
        """
        import decimal, locale, logging, os, sys, warnings, numpy as np, torch, pandas as pd, matplotlib as mpl
        def look():
            warned = [f[0] for f in warnings.filters if f[2] is RuntimeWarning and "of ours" in str(f[1])]
            return (warned, np.geterr()["over"], np.get_printoptions()["precision"],
                    torch._tensor_str.PRINT_OPTS.precision,
                    pd.get_option("display.max_rows"), mpl.rcParams["lines.linewidth"], decimal.getcontext().prec,
                    logging.getLogger("ours").level, logging.root.level, locale.setlocale(locale.LC_NUMERIC),
                    os.environ.get("NBTRAIN_TEST_A"), os.environ.get("NBTRAIN_TEST_B"),
                    [p for p in sys.path if p.startswith("/of_")], os.getcwd(),
                    torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
                    torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_grad_enabled())
        def change(warn, over, digits, shown, rows, width, prec, level, top, place,
                   a, b, folders, where, dtype, deterministic, precision, benchmark, grad):
            warnings.filters[:] = [f for f in warnings.filters if "of ours" not in str(f[1])]
            for one in warn: warnings.filterwarnings(one, "of ours", RuntimeWarning)
            np.seterr(over=over); np.set_printoptions(precision=digits); torch.set_printoptions(precision=shown)
            pd.set_option("display.max_rows", rows); mpl.rcParams["lines.linewidth"] = width
            decimal.getcontext().prec = prec; logging.getLogger("ours").setLevel(level); logging.root.setLevel(top)
            locale.setlocale(locale.LC_ALL, place)
            for name, value in (("NBTRAIN_TEST_A", a), ("NBTRAIN_TEST_B", b)):
                os.environ.pop(name, None)
                if value: os.environ[name] = value
            sys.path[:] = [p for p in sys.path if not p.startswith("/of_")] + folders
            os.chdir(where); torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(deterministic)
            torch.set_float32_matmul_precision(precision); torch.backends.cudnn.benchmark = benchmark
            torch.set_grad_enabled(grad)
        before = look()
        ours = (["error"], "raise", 3, 2, 7, 4.5, 11, 10, 20, "C.UTF-8",
                "1", None, ["/of_the_notebook"], "/", torch.float64, True, "high", True, False)
        theirs = (["ignore"], "ignore", 5, 6, 9, 2.5, 12, 40, 50, "C",
                  None, "2", ["/of_a_rank"], "/usr", torch.bfloat16, False, "medium", False, True)
        --- ranks
        assert look() == before, (look(), before)
        --- here
        change(*ours)
        --- ranks
        assert look() == ours, look()
        assert float(1 / decimal.Decimal(3)) == 0.33333333333 and str(torch.tensor(0.123456)) == "tensor(0.12)"
        change(*theirs)
        --- here
        assert look() == ours, look()
        --- ranks
        assert look() == ours, look()
        --- here
        change(*before)
        --- ranks
        assert look() == before, look()
        --- here
        pd.set_option("display.float_format", lambda x: "mine")
        mpl.rcParams["lines.linewidth"] = 3.0""",
    )
    shown = notebook("%%distributed --devices 2\nassert mpl.rcParams['lines.linewidth'] == 3.0").text
    assert "pandas: display.float_format of its settings cannot go to the ranks" in shown
    assert "cannot go" not in notebook("%%distributed --devices 2\npass").text, "said once"
    notebook("pd.reset_option('display.float_format'); mpl.rcParams['lines.linewidth'] = 1.5")


def test_a_setting_that_cannot_go_is_said_once_and_what_only_names_the_notebook_goes(notebook: Notebook) -> None:  # noqa: F811
    notebook("""
import logging, sys, types, warnings
there = sys.modules["only_here"] = types.ModuleType("only_here")
exec("class Gone(UserWarning): pass", vars(there))
class Mine(UserWarning): pass
filters = warnings.filters[:]
warnings.filterwarnings("error", "of ours", FutureWarning, "__main__"); warnings.simplefilter("ignore", Mine)""")
    look = "%%distributed --devices 2\nfound = [f[0] for f in warnings.filters if 'of ours' in str(f[1])]"
    said = notebook(f"{look}\nassert found == ['error'], found").text
    assert "warnings: the filter for Mine of its settings cannot go to the ranks" in said
    notebook("warnings.simplefilter('ignore', there.Gone); logging.getLogger('ours').level = 'HIGH'")
    said = notebook(look).text
    cannot = "a rank cannot have the notebook's settings"
    assert f"warnings: {cannot} (ModuleNotFoundError: No module named 'only_here')" in said
    assert f"logging: {cannot} (ValueError: Unknown level: 'HIGH'): set them in the %%distributed cell" in said
    assert "cannot" not in notebook(look).text
    notebook("warnings.filters[:] = filters; logging.getLogger('ours').level = 0; del sys.modules['only_here']")
    assert "cannot" not in notebook(f"{look}\nassert not found").text


@pytest.mark.parametrize("name", ["_", "__", "Out[1]", "In[1]", "_1", "_i"])
def test_what_ipython_keeps_of_cells_is_refused_with_the_line_to_write(notebook: Notebook, name: str) -> None:  # noqa: F811
    notebook("41 + 1")
    said = notebook.refused(f"%%distributed --devices 2\ny = {name}")
    assert f"(x = {name.partition('[')[0]}" in said
    assert "line 2 of the cell" in said


def test_throwaway_names_are_no_hindrance_and_check_says_what_is_not_sent(notebook: Notebook) -> None:  # noqa: F811
    notebook("%%distributed --devices 2\nfor _ in range(2): n = _\n_, m = 1, 2\nassert n + m + _ == 4")
    assert "not sent: what IPython keeps of cells (Out, In, _)" in notebook("%distributed check").text
