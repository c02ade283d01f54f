"""The page in a real Chromium: it draws its own data, without requests or errors, on every screen and on paper."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.cli.report import report
from finetune.runs.metrics_reader import read_events
from tests.report.browser import Browser, find_chromium
from tests.report.runs import HOSTILE, write_run

pytestmark = pytest.mark.slow

# Reads the vertices of a line as they were drawn, and turns pixels back into steps and values by the chart's scales.
DRAWN = """
(name, layer) => {
  const view = window.finetuneViews[name];
  const line = document.querySelector(`#chart-${name} .mark-line.role-mark.layer_${layer}_marks path`);
  const numbers = line.getAttribute("d").match(/-?[0-9.]+(?:e-?[0-9]+)?/g).map(Number);
  const found = [];
  for (let i = 0; i < numbers.length; i += 2) {
    found.push([view.scale("x").invert(numbers[i]), view.scale("y").invert(numbers[i + 1])]);
  }
  return found;
}
"""
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("vl_convert", reason="the extra [report] is not installed")
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium was found (chromium, google-chrome, or the variable CHROMIUM): the page is not opened")
    profile = Path(tempfile.mkdtemp())
    with Browser(executable, profile) as started:
        yield started
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Build a page of one run, and a page of three, the last with a hostile name."""
    pytest.importorskip("vl_convert", reason="the extra [report] is not installed")
    folder = tmp_path_factory.mktemp("runs")
    answers = [{"prompt": HOSTILE, "expected": "x" * 300, "base": HOSTILE, "tuned": "word " * 80}]
    runs = [write_run(folder / "first", result={"answers": answers})]
    runs.append(write_run(folder / "second-with-a-name-that-is-long-and-has-no-place-to-break-it", factor=0.5))
    runs.append(write_run(folder / HOSTILE.replace("/", "⁄")[:90], num_steps=45, status="failed", factor=2.0))
    pages = {"one": folder / "one.html", "three": folder / "three.html"}
    report(runs[:1], output=pages["one"])
    report(runs, output=pages["three"], data=False)
    return {**pages, "metrics": runs[0] / "metrics.jsonl"}


def drawn(browser: Browser, chart: str, layer: int) -> list[list[float]]:
    return browser.evaluate(f"({DRAWN})({json.dumps(chart)}, {layer})")


def same(found: list[list[float]], wanted: list[tuple[int, float]]) -> bool:
    """Within what a pixel's third digit can say."""
    return len(found) == len(wanted) and all(
        math.isclose(a, c, abs_tol=0.01) and math.isclose(b, d, rel_tol=2e-3, abs_tol=2e-3)
        for (a, b), (c, d) in zip(found, wanted, strict=True)
    )


def test_the_curves_that_are_drawn_have_the_points_of_metrics_jsonl(browser, pages):
    browser.open(pages["one"])
    events = read_events(pages["metrics"]).events
    steps = [(event["step"], event["loss"]) for event in events if event["event"] == "step"]
    rates = [(event["step"], event["learning_rate"]) for event in events if event["event"] == "step"]
    validations = [(e["step"], e["loss"]) for e in events if e["event"] == "validation"]
    assert same(drawn(browser, "loss", 0), steps)
    assert same(drawn(browser, "loss", 3), validations)
    assert same(drawn(browser, "learning-rate", 0), rates)
    browser.evaluate("document.querySelector('button[data-form=log]').click()")
    browser.evaluate("new Promise(done => setTimeout(done, 300))")
    assert browser.evaluate("window.finetuneViews.loss.scale('y').type") == "log"
    assert same(drawn(browser, "loss", 0), steps)
    assert browser.complaints() == []


@pytest.mark.parametrize(("name", "width"), [("one", 340), ("three", 390), ("three", 1400)])
def test_nothing_is_asked_for_said_or_cut_off(browser, pages, name, width):
    browser.open(pages[name], width=width)
    assert browser.evaluate("document.querySelectorAll('.plot svg path').length") > 5
    assert browser.evaluate(WIDE) <= 0
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('img, iframe, object, a').length") == 0


def test_it_is_dark_where_the_screen_is_and_never_on_paper(browser, pages):
    ink = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
    line = "getComputedStyle(document.querySelector('#chart-loss .layer_1_marks path')).stroke"
    browser.open(pages["one"])
    light, light_line = sum(browser.evaluate(ink)), browser.evaluate(line)
    browser.open(pages["one"], dark=True)
    dark, dark_line = sum(browser.evaluate(ink)), browser.evaluate(line)
    browser.open(pages["one"], dark=True, media="print", width=794)
    assert light > 700 > 100 > dark
    assert light_line.startswith("rgb(")
    assert light_line != dark_line
    assert sum(browser.evaluate(ink)) == light
    assert browser.evaluate(line) == light_line


def test_it_prints_with_everything_opened_and_nothing_cut_off(browser, pages):
    for name in ("one", "three"):
        browser.open(pages[name], media="print", width=680)  # A4 within its margins
        closed = browser.evaluate("document.querySelectorAll('details:not([open])').length")
        browser.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        assert closed or name == "one"
        assert browser.evaluate(WIDE) <= 0
        browser.evaluate("dispatchEvent(new Event('afterprint'))")
        assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == closed
        assert browser.pdf().startswith(b"%PDF")
    assert browser.complaints() == []


def test_values_are_read_off_under_the_pointer_and_by_the_keyboard(browser, pages):
    browser.open(pages["one"])
    x, y = browser.evaluate(
        "(() => { const view = finetuneViews.loss, box = document.querySelector('#chart-loss .plot')"
        ".getBoundingClientRect(); return [box.left + view.origin()[0] + view.padding().left + view.scale('x')(40), "
        "box.top + 50]; })()"
    )
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.evaluate("new Promise(done => setTimeout(done, 200))")
    read = "document.querySelector('#chart-loss .readout').textContent"
    assert browser.evaluate(read).startswith("step 40training0.35")
    assert browser.evaluate(read).endswith("validation0.45")
    assert browser.evaluate("document.querySelector('#chart-throughput .readout').textContent").startswith("step 40")
    browser.evaluate("document.querySelector('#chart-loss .plot').focus()")
    for name in ("ArrowRight", "ArrowRight"):
        browser.send("Input.dispatchKeyEvent", type="keyDown", key=name, code=name)
    browser.evaluate("new Promise(done => setTimeout(done, 200))")
    assert browser.evaluate(read).startswith("step 42")
    assert browser.complaints() == []


def test_a_run_can_be_taken_out_of_the_overlay_and_of_the_parallel_coordinates(browser, tmp_path):
    runs = [write_run(tmp_path / f"r{r}", [f"lora.r={r}"]) for r in (4, 8, 16)]
    report(runs, output=tmp_path / "page.html", data=False)
    browser.open(tmp_path / "page.html")
    lines = "document.querySelectorAll('#chart-parallel .mark-line.role-mark path').length"
    curves = "document.querySelectorAll('#chart-learning-rate .mark-line.role-mark path').length"
    texts = "[...document.querySelectorAll('#chart-parallel text')].map(text => text.textContent)"
    assert browser.evaluate(lines) == browser.evaluate(curves) == 3
    assert {"lora.r", "validation loss", "4", "8", "16"} <= set(browser.evaluate(texts))
    browser.evaluate("document.querySelector('#chart-parallel .plot').dispatchEvent(new PointerEvent('pointermove'))")
    browser.evaluate("document.querySelector('input[data-run]').click()")
    browser.evaluate("new Promise(done => setTimeout(done, 200))")
    assert browser.evaluate(lines) == browser.evaluate(curves) == 2
    assert browser.complaints() == []
