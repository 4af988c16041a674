"""What is said of a script when it is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from torch import nn

from nbtrain.annexes.export.loop_marks import calls
from nbtrain.annexes.export.refusals import Made
from nbtrain.annexes.export.source import Source
from nbtrain.annexes.export.statements import Kept, writes_file

SEEDS = frozenset({"manual_seed", "seed_everything", "set_seed", "seed"})
ALL = r"seed_everything\(|set_seed\("
RANDOM = {
    "torch": (r"\btorch\b", rf"{ALL}|(?<!cuda\.)\bmanual_seed\("),
    "numpy": (r"\b(np|numpy)\.random\.|split\((?!.*random_state)", rf"{ALL}|\brandom\.seed\(|default_rng\(\w"),
    "random": (r"(?<!\.)\brandom\.(?!seed)\w+\(|\bfrom random import", rf"{ALL}|(?<!\.)\brandom\.seed\("),
}
"""library → what draws from its random numbers, and what seeds them, in the notebook's text"""
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def notes(source: Source, kept: Kept, made: Made, used: Iterable[str], train: frozenset[str]) -> Iterator[str]:
    """How a run of the script would differ from the notebook's. `used`: names that the cell surely reads."""
    if cells := _trained_besides(source, kept, made, used, train):
        yield f"also trained or made besides what the script uses: {', '.join(cells)}; %distributed export --cell N"
    for statement in kept.left_out:
        if isinstance(statement.node, ast.Expr):
            line = statement.text.splitlines()[-1].strip()
            yield f"cell [{statement.cell}]: `{line}` needs nbtrain, and is not in the script"
    for statement in kept.statements:
        if statement.defines and any(map(writes_file, ast.walk(statement.node))):
            yield f"{', '.join(statement.binds)} of cell [{statement.cell}] writes a file, and so it does in the script"
    text = "\n".join([*(statement.text for statement in kept.statements), source.cell])
    for library, (draws, seeds) in RANDOM.items():
        if re.search(draws, text) and not re.search(seeds, text):
            yield f"no seed of {library} is set: what is drawn, as first weights, has other values than in the notebook"
    modules = [part for name in made.modules for part in made.namespace[name].modules()]
    statistics = any(getattr(module, "running_mean", None) is not None for module in modules)
    if source.run.strategy in ("ddp", "zero1") and statistics:
        yield "running statistics (batch norm) are those of rank 0, where nbtrain averages them"
    if source.run.pool.world_size > 1:
        if any(isinstance(module, DROPOUT) and module.p for module in modules):
            yield "dropout: each process draws for itself, others than in the notebook"
        if any(
            calls(loop) & SEEDS for loop in ast.walk(ast.parse(source.cell)) if isinstance(loop, ast.For | ast.While)
        ):
            yield (
                "a seed is set in a loop: the order of batches begins anew with it on the ranks, and not in the script"
            )


def _trained_besides(
    source: Source, kept: Kept, made: Made, used: Iterable[str], train: frozenset[str]
) -> list[str]:  # fmt: skip
    """Other distributed cells that have trained the models, or made names anew, since the script's cells made them."""
    bound = {name: statement.cell for statement in kept.statements for name in statement.binds}
    trains = re.compile(rf"\b({'|'.join(train)})\(")
    late = []
    for number, text in source.others.items():
        models = {name for name in made.models if trains.search(text) and re.search(rf"\b{name}\b", text)}
        names = models | {name for name in used if re.search(rf"^[ \t]*{name}\b(, ?\w+)* *=[^=]", text, re.MULTILINE)}
        late += [f"{name} in cell [{number}]" for name in sorted(names) if 0 < bound.get(name, 0) < number]
    return late
