"""Takes the documents' pictures of the dashboards, drawn by Grafana's libraries in Chromium.

The data are those of `tests/generate/bad_day.py`, from a simulated cluster through our own rules.
`python -m tests.generate.dashboards` writes the pictures in a minute, almost all of it
for the simulation. It fails if a panel is empty, has an error or cuts a word. For each picture, a
text file of the same name has the titles that it shows; a test compares them with the dashboards.
"""

import asyncio
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from playwright.async_api import Browser

from dashboards.build import ONE_VM, OVERVIEW, TRENDS
from tests.generate.bad_day import NOW, SETUP, record, serve_samples
from tests.generate.screenshots import FOLDER, write_picture
from tests.months.cluster import DAY, HOUR
from tests.support.browser import chromium
from tests.support.dashboards import load_dashboards
from tests.support.documents import ROOT
from tests.support.grafana import Shown, build_page, open_page, read_panels


WIDTH = 1280
NODES = ("node-1", "node-3")
"""The nodes whose load is shown."""


class Shot(NamedTuple):
    """One picture: its file, the dashboard, the seconds that it shows, and the theme."""

    name: str
    dashboard: str
    span: float
    theme: str = "light"


SHOTS = (
    Shot("dashboard-overview", OVERVIEW, 6 * HOUR),
    Shot("dashboard-trends", TRENDS, 2 * DAY, "dark"),
    Shot("dashboard-vm", ONE_VM, 6 * HOUR),
)


async def take(
    browser: Browser, url: str, shot: Shot, values: Mapping[str, str | Sequence[str]]
) -> list[str]:
    """Write one picture; returns what is wrong in it."""
    shown = Shown(load_dashboards()[shot.dashboard], NOW - shot.span, NOW, values, SETUP.interval)
    page = await open_page(browser, url, shown, shot.theme, WIDTH)
    panels = await read_panels(page)
    path = FOLDER / f"{shot.name}.png"
    write_picture(await page.screenshot(), path)
    await page.close()
    titles = "".join(f"{panel.title}\n" for panel in panels)
    path.with_suffix(".txt").write_text(titles, encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return [f"{panel.title} {fault}" for panel in panels for fault in panel.faults]


async def main() -> None:
    """Write the pictures."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    build_page()
    with tempfile.TemporaryDirectory() as directory:
        samples = Path(directory) / "samples"
        namespace, name = await asyncio.to_thread(record, samples)  # it has a loop of its own
        values: dict[str, dict[str, str | Sequence[str]]] = {
            OVERVIEW: {},
            TRENDS: {"node": NODES},
            ONE_VM: {"namespace": namespace, "name": name},
        }
        async with serve_samples(samples) as prometheus, chromium() as browser:
            wrong = [
                fault
                for shot in SHOTS
                for fault in await take(browser, prometheus.url, shot, values[shot.dashboard])
            ]
    if wrong:
        sys.exit("the pictures show something wrong: " + "; ".join(wrong))


if __name__ == "__main__":
    asyncio.run(main())
