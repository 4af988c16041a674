"""`%%distributed?`: the manual, made from the tables that the parser uses."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from nbtrain.notebook.magics.line.options import OPTIONS
from nbtrain.notebook.magics.verbs import VERBS

_HEAD = """Run this cell on every rank, and bring what it changed back into the notebook.

    %%{distributed} --strategy ddp --devices 4
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item()); log(loss=loss)

    model(x)        # in the next cell: trained; losses is filled; run the cell again and it carries on

    %%{distributed}                            good defaults: every free GPU, or some CPU ranks; ddp
    %%{distributed} -s ddp --devices "0,2"     GPUs 0 and 2; without quotes a number counts: 2 is two GPUs
    %%{distributed} --engine inprocess         one rank in the kernel, for debuggers of a front end
    %%{distributed} --engine ssh --hosts a,b   the ranks of two machines; --engine slurm: of a queue's
    %%{rank} 0,2                               this cell on ranks 0 and 2 only; 0-2 is 0, 1 and 2
    %{distributed} --devices 2                 from now on, two devices unless a cell says otherwise
    %{distributed} plan                        will the model fit, under which strategy; nothing is started
    %{distributed} pick                        the same on a form, which writes the line into the next cell
    %%{distributed} --compare ddp,fsdp         this cell for a few steps under each, and nothing of it comes home
    %{distributed} debug                       pdb on the rank that failed; breakpoint() in a cell stops there
    %{distributed} status                      one of the verbs below

Inside a cell: rank, world_size, local_rank, device, log(name=value), reduce(value), gather(value), barrier(),
setup(model, optimizer). Your own variables of these names win. Where several ranks see the same batch (under ddp2 and
pipeline), one of them speaks for all in reduce(value, "sum") and gather(value), so that no sample counts twice.

Values are literals or names of the notebook; `off` takes back a switch (--oversubscribe off) or an
option without a default (--save-every off); of any other, write the default (--strategy auto).
"""


def manual(distributed: str = "distributed", rank: str = "rank") -> str:
    """The names are those under which the magics were registered."""
    return "\n".join(
        [
            _HEAD.format(distributed=distributed, rank=rank),
            "Options",
            *_rows((option.usage, option.help) for option in OPTIONS),
            "",
            f"The strategy's own options are flags too; `%{distributed} strategies` lists them.",
            "",
            f"Verbs of %{distributed}",
            *_rows((verb.usage, verb.help) for verb in VERBS.values()),
        ]
    )


def rank_manual(distributed: str = "distributed", rank: str = "rank") -> str:
    return (
        f"Run this cell on some ranks only: `%%{rank} 0`, `%%{rank} 0,2`, `%%{rank} 0-2`.\n\n"
        f"    %%{rank} 1\n    print(device, len(loader))\n\n"
        f"The ranks are those of the last cell, unless options say otherwise; the options are those of\n"
        f"%%{distributed}. Training collectives need every rank, so they are refused here.\n"
    )


def _rows(rows: Iterable[tuple[str, str]]) -> Iterable[str]:
    for left, right in rows:
        yield f"  {left}"
        yield from textwrap.wrap(right, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
