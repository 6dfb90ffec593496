"""The report in a real browser: it draws, filters, steps, fits a phone, and loads nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_inputs import write_rows, write_trace

from dcut_sglang.cli import main

pytest.importorskip("plotly", reason="plotly is not installed (requirements/dev.txt)")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (requirements/dev.txt)"
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1280, 900), (360, 740)
CHARTS = ["throughput", "heat", "per-user", "times", "keep", "accept"]
TRACE_CHARTS = ["trace-0-times", "trace-0-keep", "trace-0-accept", "trace-0-utility"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(
            f"no Chromium found (looked for {', '.join(BROWSERS)}): apt-get install chromium"
        )
    with sync_api.sync_playwright() as playwright:
        # Chromium has no sandbox for root.
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        # It has an allocator of its own.
        env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        found = playwright.chromium.launch(executable_path=path, args=root, env=env)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    inputs = [write_rows(folder / "rows.jsonl"), write_trace(folder / "run.trace")]
    assert main(["report", *map(str, inputs), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture
def open_page(browser: Any, report: Path) -> Iterator[Callable[..., Any]]:
    """Opens the report; at the end nothing may have been complained about or asked for."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def open_at(size: tuple[int, int] = DESKTOP, **more: Any) -> Any:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **more)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(report.as_uri())
        page.wait_for_selector("body[data-ready]", timeout=120_000)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if url != report.as_uri()] == []


def shown_step(page: Any) -> str:
    return page.locator("#trace-0-view dd").first.inner_text().partition(" ")[0]


def test_every_chart_is_drawn_and_nothing_hostile_runs(open_page: Callable[..., Any]) -> None:
    page = open_page()
    for chart in [*CHARTS, *TRACE_CHARTS]:
        assert page.locator(f"#{chart} .main-svg").count() > 0, chart
        assert page.locator(f"#{chart}").inner_text().find("nothing to show") < 0, chart
    assert page.evaluate("window.attacked") is None
    assert page.locator("#throughput .scatterlayer .trace").count() == 6  # 3 arms, 2 kinds
    # dcut is 1.5 times plain under each of the four loads.
    assert page.locator("#heat").get_attribute("data-geomean") == "1.5000"
    assert "of 4 loads: 1.50" in page.locator("#heat-note").inner_text()


def test_filters_change_charts_and_table(open_page: Callable[..., Any]) -> None:
    page = open_page()
    rows = page.locator("#row-table tbody tr")
    assert rows.count() == 12
    page.locator("#filter-arm input[value=dflash]").uncheck()
    assert rows.count() == 8
    assert page.locator("#throughput .scatterlayer .trace").count() == 4
    page.locator("#filter-prompts input[value=easy]").uncheck()
    assert rows.count() == 4
    page.select_option("#filter-heat-arm", "dflash")
    assert page.locator("#heat").get_attribute("data-geomean") == "1.2500"
    for arm in ("plain", "dcut"):
        page.locator(f"#filter-arm input[value={arm}]").uncheck()
    assert "nothing to show" in page.locator("#throughput").inner_text()


def test_the_table_sorts_by_a_heading(open_page: Callable[..., Any]) -> None:
    page = open_page()
    heading = page.locator("#row-table th button", has_text="tokens/CPU-s")
    heading.click()
    column = "#row-table tbody td:nth-child(6)"
    rising = [float(text) for text in page.locator(column).all_inner_texts()]
    assert rising == sorted(rising)
    heading.click()
    assert [float(text) for text in page.locator(column).all_inner_texts()] == rising[::-1]


def test_one_steps_through_a_trace(open_page: Callable[..., Any]) -> None:
    page = open_page()
    assert shown_step(page) == "1"
    cells = page.locator("#trace-0-view table.blocks tbody tr").first.locator(".cell")
    assert cells.all_inner_texts() == ["a", "A", "A", "R", "p", "p", "·", "·"]
    facts = page.locator("#trace-0-view dl").inner_text()
    assert "predicted, ms\n10.0" in facts and "draft, wall ms\n2.00" in facts
    chosen = page.locator("#trace-0-candidates tr.chosen")
    assert chosen.locator("td").first.inner_text() == "4" and "chosen" in chosen.inner_text()
    page.click("#trace-0-next")
    assert shown_step(page) == "2"
    page.keyboard.press("ArrowRight")
    assert shown_step(page) == "3" and "Nothing was drafted" in page.locator(".why").inner_text()
    page.keyboard.press("Home")
    page.click("#trace-0-next-plain")
    assert shown_step(page) == "3"
    page.click("#trace-0-next-surprise")
    assert shown_step(page) == "5" and page.locator("#trace-0-next").is_disabled()
    assert "200% more time" in page.locator("#trace-0-view .surprise").inner_text()
    page.keyboard.press("p")
    assert shown_step(page) == "3"
    page.locator("#trace-0-slider").fill("3")
    assert shown_step(page) == "4" and "forced" in page.locator(".why").inner_text()
    assert page.locator("#trace-0-utility").is_hidden()


def test_steps_are_filtered_by_mode_and_batch_size(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.select_option("#trace-0-mode", "speculate")
    assert "of 3" in page.locator("#trace-0-view dd").first.inner_text()
    page.select_option("#trace-0-bs", "1")
    assert "No step matches" in page.locator("#trace-0-view").inner_text()
    page.select_option("#trace-0-mode", "all")
    assert shown_step(page) == "4"
    page.select_option("#trace-0-numbers", "confidence")
    assert page.locator("#trace-0-view .cell.accepted").first.inner_text().isdecimal()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(PHONE, has_touch=True, color_scheme=scheme)
    width = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert max(page.evaluate(width)) <= PHONE[0]
    for chart in [*CHARTS, *TRACE_CHARTS]:
        box = page.locator(f"#{chart}").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0], chart
    page.tap("#trace-0-next")
    assert shown_step(page) == "2" and max(page.evaluate(width)) <= PHONE[0]


def test_everything_is_reached_by_keyboard(open_page: Callable[..., Any]) -> None:
    page = open_page()
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"filter-pair", "viewer", "trace-0-next", "trace-0-slider", "trace-0-bs"} <= reached
