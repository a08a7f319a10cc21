"""The dashboards as Grafana's libraries draw them in Chromium, with the answers of a Prometheus.

A Grafana server is not needed. The page is in `tests/tools/grafana-page`; npm gets its packages.
"""

import asyncio
import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from playwright.async_api import Browser, Page, Route

from tests.support.dashboards import load_dashboards
from tests.support.documents import ROOT


SOURCE = ROOT / "tests" / "tools" / "grafana-page"
BUILT = ROOT / ".tools" / "grafana-page"
STAMP = BUILT / "built"
"""The hash of the sources of what is built."""
VERSION: str = json.loads((SOURCE / "package.json").read_text())["dependencies"]["@grafana/ui"]
PATH = "pictures"
DRAWN_AFTER = 2000.0
"""Milliseconds after the last answer until every line is drawn."""
DRAWN_WITHIN = 60.0
"""Seconds in which a busy machine draws every panel."""
EMPTY = "is empty"
PANEL = "[data-viz-panel-key]"
READ = """
panels => panels.map(panel => {
  const title = panel.querySelector("h2");
  const content = panel.querySelector("[data-testid='data-testid panel content']");
  const faults = [];
  if (panel.querySelector("[data-testid^='data-testid Panel status error'], [role=alert]"))
    faults.push("has an error");
  if (!content.querySelector("canvas, [role=grid], .no-data") && !content.innerText.trim())
    faults.push("is empty");
  for (const part of panel.querySelectorAll("*")) {
    const style = getComputedStyle(part);
    const wide = part.clientWidth && part.scrollWidth > part.clientWidth + 1;
    if (wide && style.textOverflow === "ellipsis")
      faults.push(`cuts ${part.innerText}`);
  }
  return [title.innerText, content.innerText, faults];
})
"""
"""Of each panel its title, its text, and what is wrong with it."""


class NoNode(Exception):
    """There is no npm on the PATH."""


class Panel(NamedTuple):
    """A drawn panel: its title, its text without that in a canvas, and what is wrong with it."""

    title: str
    text: str
    faults: Sequence[str]


class Shown(NamedTuple):
    """What the page shows: a dashboard, its time range in seconds since 1970, and its variables."""

    dashboard: Mapping[str, Any]
    start: float
    end: float
    values: Mapping[str, str | Sequence[str]]
    scrape_interval: float = 30


def build_page() -> None:
    """Install the packages of the page, and bundle it, unless that is done. Raises `NoNode`."""
    if shutil.which("npm") is None:
        raise NoNode("not run: there is no npm on the PATH")
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    if STAMP.exists() and STAMP.read_text() == digest.hexdigest():
        return
    BUILT.mkdir(parents=True, exist_ok=True)
    for path in SOURCE.iterdir():
        shutil.copy(path, BUILT)
    quiet = ("--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    _run("npm", "install", "--legacy-peer-deps", *quiet)
    _run(
        "node_modules/.bin/esbuild",
        "page.tsx",
        "--bundle",
        "--minify",
        "--jsx=automatic",
        "--outfile=out/page.js",
        "--log-level=error",
        '--define:process.env.NODE_ENV="production"',
        "--define:global=globalThis",
        "--loader:.ttf=empty",
        # @grafana/ui has router 5 and this package's API of 6. The scenes have router 6 itself.
        "--alias:react-router-dom-v5-compat=react-router-dom",
    )
    # Grafana's style sheet names these files.
    public = BUILT / "out" / "public"
    fonts = public / "fonts" / "inter"
    fonts.mkdir(parents=True, exist_ok=True)
    for weight, name in ((400, "Regular"), (500, "Medium")):
        file = f"node_modules/@fontsource/inter/files/inter-latin-{weight}-normal.woff2"
        shutil.copy(BUILT / file, fonts / f"Inter-{name}.woff2")
    images = BUILT / "node_modules" / "@grafana" / "ui" / "dist" / "public"
    shutil.copytree(images, public / "build", dirs_exist_ok=True)
    STAMP.write_text(digest.hexdigest())


def check_types() -> str:
    """Compile the dashboards as values of Grafana's types; returns the compiler's complaints."""
    boards = [
        f"export const board{number}: Board = {json.dumps(board)};\n"
        for number, board in enumerate(load_dashboards().values())
    ]
    (BUILT / "boards.ts").write_text('import type { Board } from "./types";\n' + "".join(boards))
    done = subprocess.run(
        # It checks only what has changed since its last run.
        ["node_modules/.bin/tsc", "-p", ".", "--incremental", "--tsBuildInfoFile", "types.json"],
        cwd=BUILT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


async def open_page(browser: Browser, url: str, shown: Shown, theme: str, width: int) -> Page:
    """The page with a dashboard of the Prometheus at `url`, drawn to its end.

    Raises AssertionError if a script fails.
    """
    user = {"theme": theme, "timezone": "utc", "locale": "en-US", "language": "en-US"}
    boot = {"settings": {"buildInfo": {"version": VERSION}}, "user": user, "navTree": []}
    data = {
        "dashboard": shown.dashboard,
        "from": datetime.fromtimestamp(shown.start, UTC).isoformat(),
        "to": datetime.fromtimestamp(shown.end, UTC).isoformat(),
        "values": shown.values,
        "scrapeInterval": shown.scrape_interval,
    }
    html = (
        '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="page.css">'
        f'<div id="root"></div><script>grafanaBootData = {json.dumps(boot)}; '
        f'shown = {json.dumps(data)}</script><script src="page.js"></script>'
    )

    async def serve(route: Route) -> None:
        name = route.request.url.partition("?")[0].partition(f"/{PATH}/")[2]
        if not name:
            await route.fulfill(body=html, content_type="text/html")
        elif (path := BUILT / "out" / name).is_file():
            await route.fulfill(path=path)
        else:
            await route.fulfill(status=404)

    errors: list[str] = []
    page = await browser.new_page(viewport={"width": width, "height": 1000})

    page.on("pageerror", lambda error: errors.append(str(error)))
    await page.route(f"{url}/{PATH}/**", serve)
    await page.goto(f"{url}/{PATH}/")
    await _show_everything(page, width)
    assert not errors, errors
    return page


async def read_panels(page: Page) -> list[Panel]:
    """The panels when all are drawn, or as they are after `DRAWN_WITHIN`."""
    until = asyncio.get_running_loop().time() + DRAWN_WITHIN
    while True:
        panels = [Panel(*panel) for panel in await page.locator(PANEL).evaluate_all(READ)]
        is_late = asyncio.get_running_loop().time() > until
        if is_late or all(EMPTY not in panel.faults for panel in panels):
            return panels
        await asyncio.sleep(0.5)


async def _show_everything(page: Page, width: int) -> None:
    """Make the window as high as the page, and wait until it is drawn."""
    await page.locator(PANEL).first.wait_for()
    height = await page.evaluate("document.documentElement.scrollHeight")
    await page.set_viewport_size({"width": width, "height": height})
    await page.wait_for_load_state("networkidle")
    await page.wait_for_timeout(DRAWN_AFTER)


def _run(*command: str) -> None:
    subprocess.run(command, cwd=BUILT, check=True)
