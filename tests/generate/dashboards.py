"""Takes the documents' pictures of the dashboards, in Chromium, with the components of Perses.

The data come from the exporter on the simulated cluster, through a real Prometheus, as in the live
test of the dashboards. The page is in `tests/tools/perses-page`. npm gets its packages, so this
needs node and npm.

`python -m tests.generate.dashboards` writes the pictures in five minutes. It fails if a panel has
no data or an error, or if a word or a legend is cut. For each picture, a text file of the same name
has the titles that it shows; a test compares them with the dashboards.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from playwright.async_api import Browser, Page, Route

from dashboards.build import ONE_VM, OVERVIEW, TRENDS
from tests.generate.screenshots import FOLDER, write_picture
from tests.integration.alerts.test_dashboards_live import HONORED, RULES_FASTER, Watched, watching
from tests.support.browser import chromium
from tests.support.dashboards import Query, perses_dashboards
from tests.support.documents import ROOT


SOURCE = ROOT / "tests" / "tools" / "perses-page"
BUILT = ROOT / ".tools" / "perses-page"
SCRAPE_INTERVAL = "1s"
NODE = "node-1"
"""The node whose load is shown."""
WIDTH = 1600
DRAWN_AFTER = 4000.0
"""Milliseconds after the last answer until every line is drawn."""
PANEL = "[data-testid=panel]"
TITLE = "[id$=-header-title]"
HEIGHT = "Math.max(...[...document.querySelectorAll('*')].map(one => one.scrollHeight))"
FAULTS = """
(panels, title) => panels.flatMap(panel => {
  const name = panel.querySelector(title).innerText;
  const faults = [];
  if (/no data|error/i.test(panel.innerText) || panel.querySelector("[role=alert]"))
    faults.push(`${name}: ${panel.innerText}`);
  if (panel.querySelector("table") && !panel.querySelector("tbody td"))
    faults.push(`${name}: no rows`);
  for (const one of panel.querySelectorAll("*")) {
    const style = getComputedStyle(one);
    const wide = style.overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1;
    // The rows of a table may scroll. Otherwise no whole line may be hidden.
    const hidden = one.scrollHeight - one.clientHeight;
    const high = style.overflowY !== "visible" && hidden >= parseFloat(style.lineHeight);
    if (one.clientWidth && (wide || high && !one.querySelector("table")))
      faults.push(`${name}: cut: ${one.innerText}`);
  }
  return faults;
})
"""
"""The panels without data or with an error, and the texts that are cut."""


class Shot(NamedTuple):
    """One picture: its file, the dashboard and the theme."""

    name: str
    dashboard: str
    theme: str = "light"


SHOTS = (
    Shot("dashboard-overview", OVERVIEW),
    Shot("dashboard-trends", TRENDS, "dark"),
    Shot("dashboard-vm", ONE_VM),
)


def build_page() -> None:
    """Install the packages of the page, and bundle it into `BUILT / "out"`."""
    BUILT.mkdir(parents=True, exist_ok=True)
    for path in SOURCE.iterdir():
        shutil.copy(path, BUILT)
    quiet = ("--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    subprocess.run(["npm", "install", *quiet], cwd=BUILT, check=True)
    subprocess.run(
        [
            "node_modules/.bin/esbuild",
            "page.jsx",
            "--bundle",
            "--minify",
            "--jsx=automatic",
            "--outfile=out/page.js",
            "--log-level=error",
            # Otherwise the page has two copies of some packages, one of each kind of module.
            "--main-fields=module,main",
            "--alias:@tanstack/react-query=./node_modules/@tanstack/react-query/build/lib/index.mjs",
            '--define:process.env.NODE_ENV="production"',
            "--define:global=globalThis",
            "--loader:.woff=dataurl",
            "--loader:.woff2=dataurl",
        ],
        cwd=BUILT,
        check=True,
    )


def adapt(config: dict[str, Any]) -> dict[str, Any]:
    """The dashboard for a run with short intervals between scrapes and between rules."""
    faster = json.loads(
        json.dumps(config).replace("60 * sum_over_time", f"{60 / RULES_FASTER:g} * sum_over_time")
    )
    for panel in faster["panels"].values():
        for query in panel["spec"]["queries"]:
            query["spec"]["plugin"]["spec"].pop("minStep", None)
    return {
        "kind": "Dashboard",
        "metadata": {"name": "shown", "project": "shown"},
        "spec": faster,
    }


async def take(browser: Browser, watched: Watched, shot: Shot) -> list[str]:
    """Write one picture; returns what is wrong in it."""
    shown = {
        "dashboard": adapt(perses_dashboards()[shot.dashboard]),
        "scrapeInterval": SCRAPE_INTERVAL,
        "theme": shot.theme,
    }
    html = (
        '<!doctype html><link rel="stylesheet" href="page.css"><div id="root"></div>'
        f"<script>shown = {json.dumps(shown)}</script><script src=page.js></script>"
    )

    async def serve(route: Route) -> None:
        name = route.request.url.partition("?")[0].rpartition("/")[2]
        if name:
            await route.fulfill(path=BUILT / "out" / name)
        else:
            await route.fulfill(body=html, content_type="text/html; charset=utf-8")

    namespace, name = watched.vm
    chosen = {ONE_VM: {"namespace": namespace, "name": name}, TRENDS: {"node": NODE}}
    asked = {
        "start": round(watched.start * 1000),
        "end": round(watched.end * 1000),
        "refresh": "0s",
        "var-job": HONORED,
        **{f"var-{name}": value for name, value in chosen.get(shot.dashboard, {}).items()},
    }
    errors: list[str] = []
    page = await browser.new_page(viewport={"width": WIDTH, "height": 1000})
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    await page.route(f"{watched.url}/pictures/**", serve)
    await page.goto(f"{watched.url}/pictures/?{urlencode(asked)}")
    await _show_everything(page)
    wrong = [*errors, *await page.locator(PANEL).evaluate_all(FAULTS, TITLE)]
    path = FOLDER / f"{shot.name}.png"
    write_picture(await page.screenshot(), path)
    titles = await page.locator(f"{PANEL} {TITLE}").all_inner_texts()
    path.with_suffix(".txt").write_text("\n".join(titles) + "\n", encoding="utf-8")
    await page.close()
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return wrong


async def end_in_a_drain(watched: Watched) -> Watched:
    """The run until the last instant at which a node was drained, so that each table has a row."""
    query = Query(OVERVIEW, "", "", "kubevirt_node_drain_started_timestamp_seconds")
    instants = [at for series in await watched.ask(query) for at, _ in series["values"]]
    return replace(watched, end=float(max(instants)))


async def _show_everything(page: Page) -> None:
    """Make the window as high as the page, because Perses loads only what can be seen."""
    height = 0
    while (wanted := await page.evaluate(HEIGHT)) != height or not height:
        height = wanted
        await page.set_viewport_size({"width": WIDTH, "height": height})
        await page.wait_for_load_state("networkidle")
        await page.wait_for_timeout(DRAWN_AFTER)


async def main() -> None:
    """Write the pictures."""
    build_page()
    with tempfile.TemporaryDirectory() as directory:
        async with watching(Path(directory), (HONORED,)) as watched, chromium() as browser:
            run = await end_in_a_drain(watched)
            wrong = {shot.name: await take(browser, run, shot) for shot in SHOTS}
    if any(wrong.values()):
        sys.exit(f"the pictures show something wrong: {wrong}")


if __name__ == "__main__":
    asyncio.run(main())
