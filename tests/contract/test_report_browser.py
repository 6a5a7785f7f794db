"""The report in a real browser: nothing fails, nothing is fetched, figures are seen, and it fits a desk and a phone."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path

import pytest

from coordinator.compare.breakeven.build import build
from coordinator.compare.breakeven.page import render as render_map
from coordinator.compare.html.page import render
from coordinator.compare.read import read
from coordinator.compare.record import write
from tests.support.browser import Page, browser, find_browser
from tests.support.planted import planted
from tests.support.records import VOID, comparison, experiment

PROGRAM = find_browser()
pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")]

FIGURES = """Array.from(document.querySelectorAll('svg')).map(s => s.getBoundingClientRect())
  .filter(r => r.width > 200 && r.height > 40).length"""
OUTSIDE = """Array.from(document.querySelectorAll('h1, h2, h3, p, svg, .card')).filter(e => {
  const r = e.getBoundingClientRect(); return r.right > document.documentElement.clientWidth + 1 || r.left < -1; }).length"""


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    """Three records side by side: three arms with everything, two paths, two paths with void probes only."""
    void = dataclasses.replace(comparison(), probes=[dataclasses.replace(p, void=VOID) for p in comparison().probes])
    pairs = []
    for name, made in (("azure-conv", comparison()), ("all-void", void)):
        write(made, tmp_path / f"{name}.json")
        pairs.append((name, read(tmp_path / f"{name}.json")))
    (tmp_path / "three.json").write_text(json.dumps(experiment()))
    pairs.insert(0, ("three-arms", read(tmp_path / "three.json")))
    path = tmp_path / "report.html"
    path.write_text(render(pairs), encoding="utf-8")
    return path


@pytest.mark.slow
async def test_the_report_opens_without_a_fault_and_fits(page_file: Path) -> None:
    assert PROGRAM is not None
    async with browser(PROGRAM) as page:
        for width in (1280, 390):
            for dark in (False, True):
                await page.open(page_file.as_uri(), width, dark=dark)
                assert page.troubles == []
                assert await page.value("document.documentElement.scrollWidth") <= width
                assert await page.value(OUTSIDE) == 0
                assert await page.value(FIGURES) == 12
                background = await page.value("getComputedStyle(document.body).backgroundColor")
                assert background == ("rgb(20, 24, 28)" if dark else "rgb(255, 255, 255)")
                assert await page.value("parseFloat(getComputedStyle(document.body).fontSize)") >= 14
                picture = await page.picture()
                assert len(picture) > 20_000
                (page_file.parent / f"{width}-{'dark' if dark else 'light'}.png").write_bytes(picture)
        paper = base64.b64decode((await page.call("Page.printToPDF", printBackground=True))["data"])
        (page_file.parent / "report.pdf").write_bytes(paper)
        assert paper.startswith(b"%PDF")
        # Nothing is cut to one sheet, and no heading takes a sheet of its own.
        assert 5 <= paper.count(b"/Type /Page\n") <= 30
        await _map_fits(page, page_file.parent)


async def _map_fits(page: Page, folder: Path) -> None:
    """The break-even map, in the same browser: a picture per load, then one per other link."""
    records = [(f"{prompt}", planted(prompt, output, (1.0, 3.0))) for prompt, output in ((256, 64), (1024, 128))]
    found = build(records, loads=(1.0, 2.0, 3.0), bandwidths=(1e9, 2e9))
    (folder / "map.html").write_text(render_map(found), encoding="utf-8")
    for width, dark in ((1280, False), (390, True)):
        await page.open((folder / "map.html").as_uri(), width, dark=dark)
        assert page.troubles == []
        assert await page.value("document.documentElement.scrollWidth") <= width
        assert await page.value(OUTSIDE) == 0
        assert await page.value(FIGURES) == 4
        assert await page.value("document.querySelectorAll('svg .edge.fitted').length") > 0
        picture = await page.picture()
        assert len(picture) > 20_000
        (folder / f"map-{width}.png").write_bytes(picture)
