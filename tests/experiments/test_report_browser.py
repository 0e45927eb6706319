"""The report in a real browser: every table and figure is there and legible, in light and in dark."""

import pathlib
import shutil

import pytest

from experiments import report, reported
from tests.experiments import run_folders

pytestmark = pytest.mark.browser

FIGURES = {"speedup", "acceptance_by_position", "accepted_lengths", "tau_and_speedup", "measured_and_expected"}
SECTIONS = ["leviathan2023-table2", "figures", "expected", "overall", "cells", "details", "runs", "traces"]

# The WCAG contrast of an element's text with what lies behind it.
CONTRAST = """element => {
  const parse = color => (color.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [R, G, B] = [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * R + 0.7152 * G + 0.0722 * B;
  };
  const style = getComputedStyle(element);
  const text = parse(element instanceof SVGElement ? style.fill : style.color);
  let behind = element;
  while (behind && (parse(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
  const [a, b] = [light(text), light(parse(getComputedStyle(behind || document.body).backgroundColor))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""

# The words of a picture that reach beyond its edges.
CUT_OFF = """svg => {
  const edge = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    const within = (low, high, from, to) => from - 1 <= low && high <= to + 1;
    const across = within(box.left, box.right, edge.left, edge.right);
    return !(across && within(box.top, box.bottom, edge.top, edge.bottom));
  }).map(text => text.textContent);
}"""


# Pairs of words in a picture that lie upon one another.
OVERLAPS = """svg => {
  const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([name, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 3) found.push([name, other]);  // lines of one title may touch
  }));
  return found;
}"""


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: browser)")
    with playwright.sync_playwright() as driver:
        names = ("chromium", "chromium-browser", "google-chrome", "chrome")
        found = next(filter(None, map(shutil.which, names)), None) or driver.chromium.executable_path
        if not pathlib.Path(found).exists():
            pytest.skip("no Chromium: install one, or run `playwright install chromium`")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])  # root has no sandbox
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_record):
    """A run with its report."""
    folder = run_folders.full(tmp_path_factory.mktemp("report") / "run", make_record)
    assert report.run([str(folder)]) == 0
    return folder


@pytest.fixture
def open_page(chromium, folder):
    """A function that opens the report; afterwards nothing may have gone wrong on the page."""
    wrong, asked, pages = [], [], []

    def open_page(scheme="light", width=1280):
        page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((folder / "report.html").as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert wrong == []
    assert {url for url in asked if not url.startswith("data:")} == {(folder / "report.html").as_uri()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_table_and_figure_is_there_and_legible(open_page, scheme):
    page = open_page(scheme)
    assert page.evaluate("[...document.querySelectorAll('main > section')].map(s => s.id)") == SECTIONS
    figures = page.locator("figure")
    assert {figure.get_attribute("id") for figure in figures.all()} == {f"figure-{name}" for name in FIGURES}
    for figure in figures.all():
        box = figure.locator("svg").bounding_box()
        assert box["width"] > 400 and box["height"] > 150
        assert figure.locator("svg text").count() > 5
        for text in (figure.locator("svg text").first, figure.locator("svg text").last, figure.locator("figcaption")):
            assert text.evaluate(CONTRAST) > 4.5
        assert figure.locator("svg").evaluate(CUT_OFF) == []
    tables = page.locator("table")
    assert tables.count() == 8
    for table in tables.all():
        assert table.is_visible() and table.locator("tbody tr").count() > 0
        assert table.locator("td").first.evaluate(CONTRAST) > 4.5
    assert page.locator("td.marked").first.evaluate(CONTRAST) > 4.5
    for origin in ("prefill", "accepted", "corrected", "bonus", "undrafted"):
        assert page.locator(f".legend .{origin}").evaluate(CONTRAST) > 4.5
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_many_methods_with_long_names_are_all_there(chromium, tmp_path, make_record):
    folder = run_folders.crowded(tmp_path / "run", make_record)
    assert report.run([str(folder)]) == 0
    names = {record.method for record in reported.load(folder).records} - {"autoregressive"}
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto((folder / "report.html").as_uri())
    figures = page.locator("figure")
    assert figures.count() == len(FIGURES)
    for figure in figures.all():
        svg = figure.locator("svg")
        shown = " ".join(svg.locator("text").all_text_contents())
        assert [name for name in names if name not in shown] == []
        assert svg.evaluate(CUT_OFF) == [] and svg.evaluate(OVERLAPS) == []
    page.close()


def test_two_methods_stand_side_by_side_and_can_be_chosen(open_page):
    page = open_page()
    answers = page.locator(".answer:visible")
    assert answers.count() == 2
    boxes = [answer.bounding_box() for answer in answers.all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert page.locator("#left").input_value() == "standard" and page.locator("#right").input_value() == "<b>"
    page.select_option("#left", "<b>")
    page.select_option("#right", "standard")
    left = min(answers.all(), key=lambda answer: answer.bounding_box()["x"])
    assert left.locator("h4").inner_text() == "<b>"
    page.select_option("#right", "<b>")
    assert answers.count() == 1
    token = answers.locator(".t.corrected")
    token.hover()
    assert token.get_attribute("title").startswith("round 1, draft 2 rejected")
    assert page.locator(".round:hover").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"


def test_rounds_can_stand_on_lines_of_their_own(open_page):
    page = open_page()
    tops = lambda: [box.bounding_box()["y"] for box in page.locator(".answer:visible").first.locator(".round").all()]
    assert len(set(tops())) < 3
    page.check("#by-round")
    assert len(set(tops())) == 3


def test_a_narrow_screen_scrolls_tables_not_the_page(open_page):
    page = open_page(width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
