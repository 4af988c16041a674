// What fingers and keys do in a chart. The mouse is uPlot's.

import { dragged, scaled, shifted } from "./axis.js";

const FAR = 10; // columns that an arrow goes with Shift

// `chart` has: plot, shown, part, extent(), zoom(part), point(index), axis, fullSize.
export function follow(box, chart) {
  const fingers = new Map(); // id of a pointer -> where it is
  const at = (event) => event.clientX - chart.plot.over.getBoundingClientRect().left;

  box.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch" || !chart.plot || event.target !== chart.plot.over) return;
    fingers.set(event.pointerId, at(event));
    event.target.setPointerCapture?.(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return;
    const before = [...fingers.values()];
    fingers.set(event.pointerId, at(event));
    const after = [...fingers.values()];
    // One finger shows values; of a part it moves what is seen, and two change how much.
    if (before.length > 1 || chart.axis.part)
      chart.zoom(dragged(chart.part, before, after, chart.plot.over.clientWidth, chart.extent()));
    else chart.plot.setCursor({ left: after[0], top: chart.plot.over.clientHeight / 2 }, true, true);
  });
  const lifted = (event) => fingers.delete(event.pointerId);
  box.addEventListener("pointerup", lifted);
  box.addEventListener("pointercancel", lifted);
  box.addEventListener("keydown", (event) => key(event, chart));
  box.addEventListener("blur", () => chart.point(undefined));
}

function key(event, chart) {
  const { plot, shown } = chart;
  if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
  const here = plot.cursor.left >= 0 ? plot.cursor.idx : null;
  const middle = here === null ? (chart.part[0] + chart.part[1]) / 2 : shown[here];
  const move = (by) => {
    const next = here === null ? shown.length - 1 : here + by;
    if ((next < 0 || next >= shown.length) && chart.axis.part)
      chart.zoom(shifted(chart.part, by > 0 ? 0.25 : -0.25, chart.extent()));
    chart.point(Math.min(shown.length - 1, Math.max(0, next)));
  };
  const by = event.shiftKey ? FAR : 1;
  const does = {
    ArrowLeft: () => move(-by),
    ArrowRight: () => move(by),
    Home: () => chart.point(0),
    End: () => chart.point(shown.length - 1),
    "+": () => chart.zoom(scaled(chart.part, 0.5, middle, chart.extent())),
    "-": () => chart.zoom(scaled(chart.part, 2, middle, chart.extent())),
    Enter: () => chart.fullSize.toggle(),
    Escape: () => chart.axis.zoom(null),
  };
  does["="] = does["+"];
  // Escape in full size goes back to the page, where nothing is zoomed.
  if (!does[event.key] || (event.key === "Escape" && !chart.axis.part)) return;
  event.preventDefault();
  event.stopPropagation();
  does[event.key]();
}
