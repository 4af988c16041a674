"""The strategy picker made of plain ipywidgets (7 or 8), for pages that show no other package's widgets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from nbtrain.base import tables
from nbtrain.base.humanize import size
from nbtrain.watch.views.base import widget_bundle

Do = Callable[[Mapping[str, Any]], None]

WIDE = {"description_width": "9em"}
GOALS = {"speed": "speed", "batch": "largest batch", "model": "largest model"}
LOSSES = {"no": "none", "small": "small", "any": "any"}
TONES = {"bad": "#d5473c", "good": "#2f9648", "wait": "#b07a10"}
"""readable on light and on dark ground"""
PLACES = ("found", "cards", "line", "note", "said", "receipt", "compared")
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")


class PickerForm:
    """Shows the same as the other picker, without bars, and does not write into cells."""

    def __init__(self, data: Mapping[str, Any], do: Do) -> None:
        self._do = do
        self._data: Mapping[str, Any] = data
        self._hearing = False
        """inputs are being updated, so that their changes are not the user's"""
        self._html = {name: widgets.HTML() for name in PLACES}
        self._goal = self._dropdown("goal", "goal", [(words, name) for name, words in GOALS.items()])
        self._loss = self._dropdown("loss", "slowdown", [(words, name) for name, words in LOSSES.items()])
        self._precision = self._dropdown("precision", "precision", list(data["precisions"]))
        self._ranks = self._number("ranks", data["ranks"])
        self._batch = self._number("batch", data["batch"] or 0, empty=0)
        self._strategy = self._dropdown("strategy", "strategy", [])
        self._options = widgets.VBox([])
        self._ticked = widgets.SelectMultiple(description="measure", options=[], style=WIDE, rows=5)
        self._ticked.observe(self._tick, "value")
        self._ticks = False
        """the user has ticked what is to be measured"""
        self._find = self._button("Find batch", lambda: self._measure("batch"))
        verify = self._button("Verify", lambda: self._ask(kind="verify"))
        use = self._button("Use in the next cell", lambda: self._ask(kind="use"))
        self._asked_for: Any = None
        """which options are shown"""
        self.widget = widgets.VBox([
            self._html["found"],
            widgets.HBox([self._ranks, self._batch, self._precision]),
            widgets.HBox([self._goal, self._loss]),
            self._html["cards"],
            self._strategy,
            self._options,
            self._html["line"],
            self._html["note"],
            self._ticked,
            widgets.HBox([self._button("Measure", self._measure), self._find, verify, use]),
            self._html["said"],
            self._html["receipt"],
            self._html["compared"],
        ])  # fmt: skip
        self.show(data)

    @property
    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its mimebundle and metadata."""
        return widget_bundle(self.widget.model_id), {}

    def show(self, data: Mapping[str, Any]) -> None:
        self._data, self._hearing = data, True
        try:
            self._words(data)
            for name in ("goal", "loss", "precision", "ranks"):
                getattr(self, f"_{name}").value = data[name]
            plan = data["plan"]
            self._batch.value = data["batch"] or (plan["samples"] if plan else 0)
            self._loss.disabled = data["goal"] == "speed"
            self._find.disabled = data["goal"] != "batch"
            self._choices(data)
            self._inputs(data)
        finally:
            self._hearing = False

    def _words(self, data: Mapping[str, Any]) -> None:
        shown = {
            "found": _found(data),
            "cards": _cards(data),
            "line": f"<code>{escape(data['line'])}</code>" if data["line"] else _toned(data["wrong"], "bad"),
            "note": _toned(data["note"], "wait"),
            "said": _toned(data["said"][0], data["said"][1]) or _busy(data),
            "receipt": f"<pre>{escape(data['receipt']['text'])}</pre>" if data["receipt"] else "",
            "compared": _compared(data["compared"]),
        }
        for name, text in shown.items():
            self._html[name].value = text

    def _choices(self, data: Mapping[str, Any]) -> None:
        names = [variant["name"] for card in data["cards"] if not card["reason"] for variant in card["variants"]]
        names = list(dict.fromkeys([*names, _variant(data)["name"]]))
        if tuple(names) != tuple(self._strategy.options):
            ticked = [name for name in self._ticked.value if name in names]
            self._strategy.options = self._ticked.options = names
            self._ticked.value = ticked
        self._strategy.value = _variant(data)["name"]
        if not self._ticks:
            self._ticked.value = [name for name in data["worth"] if name in names]

    def _inputs(self, data: Mapping[str, Any]) -> None:
        """Make the inputs again for another strategy; else only update their values, as the user may be typing."""
        wanted = [(option["field"], option["kind"]) for option in data["options"]]
        if (data["strategy"], wanted) != self._asked_for:
            self._asked_for = data["strategy"], wanted
            self._options.children = tuple(self._input(option) for option in data["options"])
        for box, option in zip(self._options.children, data["options"], strict=True):
            value = option["value"] == "on" if option["kind"] == "switch" else option["value"]
            if box.children[0].value != value:
                box.children[0].value = value

    def _input(self, option: Mapping[str, Any]) -> Any:
        name = option["flag"][2:]
        made: Any
        if option["kind"] == "switch":
            made = widgets.Checkbox(description=name, value=option["value"] == "on", style=WIDE)
        elif option["kind"] == "choice":
            made = widgets.Dropdown(description=name, options=option["choices"], value=option["value"], style=WIDE)
        else:
            made = widgets.Text(description=name, value=option["value"], style=WIDE, continuous_update=False)

        def changed(change: Mapping[str, Any]) -> None:
            value = change["new"]
            typed = ("on" if value else "off") if isinstance(value, bool) else value
            self._ask(kind="option", name=option["field"], value=typed)

        made.observe(changed, "value")
        return widgets.HBox([made, widgets.HTML(f"<small>{escape(option['help'])}</small>")])

    def _dropdown(self, name: str, words: str, options: Sequence[Any]) -> Any:
        made = widgets.Dropdown(description=words, options=options, style=WIDE)

        def changed(change: Mapping[str, Any]) -> None:
            if name != "strategy":
                self._ask(kind="set", name=name, value=change["new"])
            elif change["new"] is not None:
                self._ask(kind="take", line=_named(self._data, change["new"])["line"])

        made.observe(changed, "value")
        return made

    def _number(self, name: str, value: int, empty: int | None = None) -> Any:
        """`empty`: the number that means none."""
        made = widgets.BoundedIntText(description=name, value=value, min=0, max=10**9, style=WIDE)

        def changed(change: Mapping[str, Any]) -> None:
            self._ask(kind="set", name=name, value=None if change["new"] == empty else change["new"])

        made.observe(changed, "value")
        return made

    def _button(self, words: str, do: Callable[[], None]) -> Any:
        made = widgets.Button(description=words, layout=widgets.Layout(width="auto"))
        made.on_click(lambda _: do())
        return made

    def _tick(self, change: Mapping[str, Any]) -> None:
        self._ticks = self._ticks or not self._hearing

    def _measure(self, goal: str = "speed") -> None:
        self._ask(kind="measure", goal=goal, names=list(self._ticked.value))

    def _ask(self, **message: Any) -> None:
        if not self._hearing:
            self._do(message)


def _variant(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The chosen variant."""
    chosen = [variant for card in data["cards"] for variant in card["variants"] if variant["chosen"]]
    return chosen[0] if chosen else {"name": data["strategy"], "line": f"--strategy {data['strategy']}"}


def _named(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    named = [variant for card in data["cards"] for variant in card["variants"] if variant["name"] == name]
    return named[0] if named else _variant(data)


def _found(data: Mapping[str, Any]) -> str:
    devices = [
        f"{escape(device['name'])}, {size(device['total'])}, {size(device['used'])} in use" for device in data["found"]
    ]
    plan = data["plan"]
    model = "" if plan is None else f"<br>{escape(plan['model'])} · {plan['parameters']:,} parameters"
    lacks = f"<br>{escape(data['lacks'])}" if data["lacks"] else ""
    return "<br>".join(devices) + model + lacks


def _cards(data: Mapping[str, Any]) -> str:
    few = [card for card in data["cards"] if card["first"] or card["chosen"]]
    others = [card for card in data["cards"] if card not in few]
    why = f"<p>★ {escape(data['plan']['why'])}</p>" if data["plan"] else ""
    more = f"<details><summary>More strategies ({len(others)})</summary>{_table(others)}</details>" if others else ""
    return tables.STYLE + _table(few) + more + why


def _table(cards: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tables.Row] = []
    for card in cards:
        shown = card["shown"]
        name = f"{'★ ' if card['recommended'] else ''}{shown['name'] if not card['reason'] else card['name']}"
        rows.append((name, *_figures(shown), card["reason"] or card["summary"]))
    return tables.html(("strategy", *PARTS, "limit", "what it is"), rows)


def _figures(shown: Mapping[str, Any]) -> list[str]:
    memory = shown["memory"]
    if memory is None:
        return [""] * (len(PARTS) + 1)
    fits = {False: ", does not fit", None: ""}.get(shown["fits"], ", close" if shown["tight"] else "")
    return [
        *(size(memory[name]) for name in PARTS),
        (size(shown["room"]) if shown["room"] is not None else "not known") + fits,
    ]


def _compared(compared: Mapping[str, Any] | None) -> str:
    if compared is None:
        return ""
    head, *rows = compared["table"]
    use = f"<p>{escape(compared['use'])}</p>" if compared["use"] else ""
    return f"<p>{escape(compared['title'])}</p>{tables.html(head, rows)}{use}{compared['picture']}"


def _busy(data: Mapping[str, Any]) -> str:
    words = {
        "plan": "Estimating …",
        "measure": "Measuring … Press ■ in the toolbar to stop.",
        "verify": "Verifying … Press ■ in the toolbar to stop.",
    }
    return _toned(words.get(data["busy"], ""), "wait")


def _toned(words: str, tone: str) -> str:
    return f'<span style="color:{TONES.get(tone, "inherit")}">{escape(words)}</span>' if words else ""
