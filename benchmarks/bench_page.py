"""What the dashboard costs the browser: a redraw after a million logged points, and an hour's news in its memory."""

from __future__ import annotations

from typing import Any

from benchmarks.measure import Table
from tests.support.demonstration import demonstration
from tests.support.lab import CHROMIUM, QUIET

POINTS = 1_000_000
HOUR = 36_000
"""messages: ten a second"""

# Before anything else runs: how long the callbacks of each frame take, with what they leave for right after them.
WATCH = """(() => {
    window.frames_ = [];
    const next = window.requestAnimationFrame.bind(window);
    let frame = null;
    window.requestAnimationFrame = (callback) => next((time) => {
        const began = performance.now();
        if (frame?.time !== time) window.frames_.push((frame = { time, took: 0 }));
        const mine = frame;
        callback(time);
        for (const canvas of document.querySelectorAll("canvas")) canvas.getContext("2d").getImageData(0, 0, 1, 1);
        Promise.resolve().then(() => Promise.resolve()).then(() => (mine.took += performance.now() - began));
    }); })()"""

# Points of one metric, given to the ranks in turn, as news of a running feed; two of them stand out.
FILL = """async ({ points, ranks }) => {
    const { run, model } = window.demo;
    const extremes = new Map([[Math.round(points / 3), 40], [Math.round(points / 2), -40]]);
    for (let step = 0; step < points / ranks; step += 2000) {
        const xs = Array.from({ length: 2000 }, (_, i) => step + i);
        const of = (rank) => xs.map((x) => extremes.get(x * ranks + rank) ?? Math.sin(x / 3e4) + Math.sin(x * 12.9898));
        const curves = Array.from({ length: ranks }, (_, rank) => [`metric/loss/${rank}`, [xs, of(rank)]]);
        run.seq += 1;
        model.say({ kind: "news", seq: run.seq, now: step / 100, ranks: [], points: Object.fromEntries(curves) });
        if (step % 100000 === 0) await new Promise(requestAnimationFrame);
    } }"""

# One more point, and the frames until it is drawn.
REDRAW = """async ({ times, ranks, last }) => {
    const { run, model } = window.demo;
    const frame = () => new Promise(requestAnimationFrame);
    const took = [];
    for (let i = 0; i < times; i++) {
        await frame(); await frame();
        window.frames_.length = 0;
        const of = (rank) => [`metric/loss/${rank}`, [[last + i], [0]]];
        run.seq += 1;
        const points = Object.fromEntries(Array.from({ length: ranks }, (_, rank) => of(rank)));
        model.say({ kind: "news", seq: run.seq, now: i, ranks: [], points });
        await frame(); await frame(); await frame(); await frame();
        took.push(Math.max(...window.frames_.map((one) => one.took)));
    }
    return took.sort((a, b) => a - b); }"""

NEWS = """async (messages) => {
    const { run, model } = window.demo;
    for (let i = 0; i < messages; i++) {
        model.say(run.news());
        if (i % 200 === 0) await new Promise(requestAnimationFrame);
    } }"""

TOP = """async () => {
    const over = document.querySelector(".nbt-chart .u-over"), box = over.getBoundingClientRect();
    const canvas = over.parentElement.querySelector("canvas"), scale = devicePixelRatio;
    const pixels = canvas.getContext("2d").getImageData(over.offsetLeft * scale, over.offsetTop * scale,
        box.width * scale, box.height * scale);
    const rows = [];
    for (let y = 0; y < pixels.height; y++) {
        let coloured = 0;
        for (let x = 0; x < pixels.width; x++) {
            const [r, g, b, a] = pixels.data.slice(4 * (y * pixels.width + x), 4 * (y * pixels.width + x) + 4);
            if (a > 40 && Math.max(r, g, b) - Math.min(r, g, b) > 30) coloured += 1;
        }
        if (coloured) rows.push(y / pixels.height);
    }
    return [rows[0], rows[rows.length - 1]]; }"""


def heap(page: Any) -> float:
    """Megabytes of its JavaScript that are in use after what is not needed was given up."""
    with_tools = page.context.new_cdp_session(page)
    with_tools.send("HeapProfiler.collectGarbage")
    used = with_tools.send("Runtime.getHeapUsage")["usedSize"] / 1e6
    with_tools.detach()
    return used


def opened(browser: Any, address: str, what: str) -> Any:
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.add_init_script(WATCH)
    page.goto(f"{address}&ticks=0&{what}")
    page.wait_for_function("window.demo?.ready")
    return page


def redraws(table: Table, browser: Any, address: str, ranks: int, smoothing: str = "") -> None:
    page = opened(browser, address, f"ranks={ranks}&metrics=1")
    page.evaluate(FILL, {"points": POINTS, "ranks": ranks})
    if smoothing:
        page.get_by_role("slider", name="smoothing").fill(smoothing)
    took = page.evaluate(REDRAW, {"times": 60, "ranks": ranks, "last": POINTS})
    top, bottom = page.evaluate(TOP)
    height = f"{100 * (bottom - top):.0f} % of the height, from its extremes"
    words = f"median {took[len(took) // 2]:.1f} ms; the curve takes {height}"
    what = f"{POINTS:,} points of {ranks} rank{'s' * (ranks > 1)}{', smoothed' * bool(smoothing)}"
    table.row(f"a redraw of {what}, slowest of {len(took)}", took[-1], 16, "ms", words)
    page.close()


def memory(table: Table, browser: Any, address: str) -> None:
    page = opened(browser, address, "ranks=4&gpu")
    empty = heap(page)
    page.evaluate(NEWS, HOUR // 12)
    early = heap(page)
    page.evaluate(NEWS, HOUR - HOUR // 12)
    late = heap(page)
    table.row("the page's memory after an hour, over that after 5 minutes", late - early, 20, "MB", "")
    print(f"    at first {empty:.1f} MB, after 5 minutes {early:.1f} MB, after an hour {late:.1f} MB", flush=True)
    page.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        print("the page: there is no Chromium here")
        return
    table = Table("the page")
    with demonstration() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        for ranks in (1, 4, 16, 64):
            redraws(table, browser, address, ranks)
        redraws(table, browser, address, 16, smoothing="0.9")
        memory(table, browser, address)
        browser.close()


if __name__ == "__main__":
    main()
