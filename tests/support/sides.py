"""A notebook and its ranks in one process: a namespace for each, and real parcels between them."""

from __future__ import annotations

import gc
import math
import textwrap
from collections.abc import Iterable
from typing import Any

from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.parcel import HomeParcel
from nbtrain.notebook.sync.notebook_side import NotebookSide, Outgoing
from nbtrain.worker.home.pack_changes import KERNEL
from nbtrain.worker.home.rank_side import RankSide


def namespace() -> dict[str, Any]:
    return {"__name__": "__main__", "__builtins__": __builtins__}


def public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def run(source: str, where: dict[str, Any]) -> None:
    exec(compile(textwrap.dedent(source), "<cell>", "exec"), where)


class Sides:
    """What the session does between the two, without processes."""

    def __init__(self, directory: Any, ranks: int = 1) -> None:
        self.here = namespace()
        self.notebook_side = NotebookSide(self.here, str(directory), range(ranks), {})
        self.twins = [RankSide(rank, ranks, namespace(), str(directory), "cpu") for rank in range(ranks)]
        self._cell: tuple[Outgoing, dict[str, Any]] | None = None

    def run(self, source: str) -> None:
        """A cell of the notebook."""
        run(source, self.here)

    def __call__(self, expression: str) -> Any:
        return eval(expression, self.here)

    def there(self, expression: str, rank: int = 0) -> Any:
        return eval(expression, self.twins[rank].namespace)

    def out(self, names: Iterable[str] | None = None) -> None:
        """The way to the ranks; with `home`, what `%%distributed` does."""
        out = self.notebook_side.outgoing(public(self.here) if names is None else names, ())
        bound: dict[str, Any] = {}
        for twin in self.twins:
            twin.packer.released(KERNEL, out.released.get(twin.rank, ()))
            touched, bound = twin.open(out.parcel, out.drop, out.unbind)
            twin.start(touched, lead=twin.rank == 0)
        self._cell = out, bound

    def home(self) -> HomeParcel:
        assert self._cell is not None
        home = self.twins[0].homeward(self._cell[1], (), math.inf).pack(self.twins[0].packer)
        for twin in self.twins:
            self.notebook_side.packer.released(twin.rank, twin.released())
        self.notebook_side.homecoming(0, home, None)
        for twin in self.twins[1:]:
            self.notebook_side.lacks(twin.adopt(home.news))
        return home

    def distributed(self, source: str, names: Iterable[str] | None = None) -> HomeParcel:
        """A cell on the ranks."""
        self.out(names)
        for twin in self.twins:
            twin.namespace["rank"] = twin.rank
            twin._holds["rank"] = twin.rank
            run(source, twin.namespace)
        return self.home()

    def unsent(self) -> list[str]:
        """Names or kinds of the objects that the next cell would send."""
        return _pending(self.notebook_side.table, self.here)

    def unsent_there(self) -> list[str]:
        twin = self.twins[0]
        return _pending(twin.table, {n: v for n, v in twin.namespace.items() if n != "rank"} | {"__name__": "__main__"})

    def close(self) -> None:
        self.here.clear()
        self.notebook_side.close()
        for twin in self.twins:
            twin.forget(lambda whole: None, (), (), False)
        mapped = self.notebook_side.packer._count
        del self.notebook_side  # what came home may be mapped, too
        self.twins.clear()
        self._cell = None
        if mapped:
            gc.collect()


def _pending(table: ObjectTable, where: dict[str, Any]) -> list[str]:
    walk = Walk(table, where, keep_home=True)
    for name in public(where):
        walk.name(name, where[name])
    found = [table.nodes[record.key].kind.name for record in walk.finish().records]
    walk.undo()
    return found
