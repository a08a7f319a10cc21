"""The page in a real Chromium, with a demo that shows many states and whose clock is stopped."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from axe_playwright_python.async_playwright import (  # type: ignore[import-untyped]
    Axe,
)
from playwright.async_api import Browser, Page, expect

from exporter.server.apps import make_query_app
from tests.cluster import poll
from tests.generate.screenshots import FOLDER, SHOTS, Shot, read_words
from tests.support.browser import NoChromium, Still, chromium, standing_demo
from tests.support.serving import serving
from tests.unit.server.page.test_model import bad_day


PERIOD = 5_000
"""Milliseconds between two refreshes."""
LINE = 22
"""The height of a line of text, in pixels."""


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for all tests of this file.

    Without Chromium the tests are skipped, and in CI they fail.
    """
    try:
        async with chromium() as browser:
            yield browser
    except NoChromium as none:
        if "CI" in os.environ:
            pytest.fail(str(none))
        pytest.skip(str(none))


@pytest.fixture(scope="module")
async def demo(browser: Browser) -> AsyncIterator[Still]:
    """One demo for all tests of this file, if there is a Chromium."""
    assert browser.is_connected()
    async with standing_demo() as demo:
        yield demo


@asynccontextmanager
async def visit(browser: Browser, url: str, **options: Any) -> AsyncIterator[Page]:
    """Open a page; fails if the page had an error or loaded anything from another origin.

    An error that contains one of `faults` is allowed, because the test provokes it.
    """
    expected = options.pop("faults", ())
    context = await browser.new_context(**options)
    page = await context.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    try:
        await page.goto(url)
        yield page
        origin = url.split("/", 3)[2]
        assert {url.split("/", 3)[2] for url in asked if not url.startswith("data:")} == {origin}
        assert [fault for fault in faults if not any(part in fault for part in expected)] == []
    finally:
        await context.close()


async def text(page: Page, selector: str) -> str:
    """The text of an element, with single spaces."""
    return " ".join((await page.locator(selector).inner_text()).split())


async def axe_faults(page: Page) -> str:
    """The faults that axe-core finds in the page."""
    results = await Axe().run(page)
    return str(results.generate_report()) if results.violations_count else ""


class TestLooks:
    """Accessibility, and use without JavaScript."""

    @pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
    async def test_it_is_accessible(
        self, demo: Still, browser: Browser, scheme: Any, width: int
    ) -> None:
        """axe-core finds no fault: light and wide, dark and narrow, with all details open."""
        size = {"width": width, "height": 800}
        moved = (await demo.get("/v1/blocked"))["blocked"][0]
        pages = (demo.query, f"{demo.query}/vmis/{moved['namespace']}/{moved['name']}")
        for url in (*pages, demo.metrics) if width > 360 else pages:
            async with visit(browser, url, color_scheme=scheme, viewport=size) as page:
                await page.evaluate("document.querySelectorAll('details').forEach(d => d.open = 1)")
                assert await axe_faults(page) == ""
                background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (background == "rgb(18, 21, 24)") is (scheme == "dark")
                assert await page.evaluate("document.getAnimations().length") == 0

    @pytest.mark.parametrize("shot", SHOTS, ids=lambda shot: shot.name)
    async def test_the_pictures_are_up_to_date(
        self, demo: Still, browser: Browser, shot: Shot
    ) -> None:
        """The pictures in the documents have the titles and columns of the present pages."""
        async with visit(browser, f"{demo.query}/{shot.query}") as page:
            words = await read_words(page)

        kept = (FOLDER / f"{shot.name}.txt").read_text(encoding="utf-8")
        assert words == kept, "run `make screenshots`"

    async def test_the_keyboard_reaches_everything(self, demo: Still, browser: Browser) -> None:
        """The Tab key moves a visible focus from the skip link through the filter to the rows."""
        async with visit(browser, demo.query) as page:
            reached = []
            for _ in range(14):
                await page.keyboard.press("Tab")
                reached.append(
                    await page.evaluate(
                        """() => {
                            const at = document.activeElement, style = getComputedStyle(at);
                            const box = at.getBoundingClientRect();
                            if (style.outlineStyle === "none" || box.left < 0) return "unseen";
                            return at.name || at.id || at.getAttribute("href") || at.localName;
                        }"""
                    )
                )
            row = page.locator("#stuck .rows > li").first
            namespace, name = [
                await row.get_attribute(f"data-{key}") for key in ("namespace", "name")
            ]
            vmi = await demo.get(f"/v1/vmis/{namespace}/{name}")

        assert reached[:6] == ["#main", "live-pause", "verdict", "vm", "button", "summary"]
        book, node = f"/runbooks/{vmi['evacuation']['runbook']}", f"/?node={vmi['node']}#drain"
        assert reached[6:10] == [book, f"/vmis/{namespace}/{name}", node, "summary"]
        assert "unseen" not in reached

    async def test_a_button_copies_the_command(self, demo: Still, browser: Browser) -> None:
        """Each command has a button that copies it, and the page says so."""
        clipboard = ["clipboard-read", "clipboard-write"]
        async with visit(browser, demo.query, permissions=clipboard) as page:
            await page.locator("#stuck .rows summary").first.click()
            command = await page.locator("[data-field=command]").first.text_content()
            await page.get_by_role("button", name="Copy the command").first.click()
            await expect(page.locator("#live-status")).to_have_text("Copied the command")
            assert await page.evaluate("navigator.clipboard.readText()") == command

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    async def test_thirty_stuck_vms_fill_two_screens(self, browser: Browser, scheme: Any) -> None:
        """At 1,280 px, 30 stuck VMs have a line each, all within two screens, and rows open."""
        service, size = bad_day(), {"width": 1280, "height": 800}
        async with (
            serving(make_query_app(service)) as url,
            visit(browser, url, color_scheme=scheme, viewport=size) as page,
        ):
            rows = page.locator("#stuck .rows > li")
            boxes = [await row.bounding_box() for row in await rows.all()]
            bounds = [(box["height"], box["y"] + box["height"]) for box in boxes if box]
            assert len(bounds) == 30
            assert max(height for height, _ in bounds) < 2 * LINE
            assert max(bottom for _, bottom in bounds) <= 2 * size["height"]
            assert await page.evaluate("document.documentElement.scrollWidth") == size["width"]
            await rows.last.locator("summary").click()
            await expect(rows.last.locator("[data-field=nextStep]")).to_be_visible()
            assert await axe_faults(page) == ""

    async def test_it_works_without_javascript(self, demo: Still, browser: Browser) -> None:
        """Without JavaScript everything works except the refresh, and the page says so."""
        async with visit(browser, demo.query, java_script_enabled=False) as page:
            await expect(page.locator("#live-status")).to_have_text("Reload to update.")
            await expect(page.locator("#live-pause")).to_be_hidden()
            await expect(page.locator(".copy").first).to_be_hidden()
            rows = await demo.get("/v1/evacuations")
            every = rows["evacuations"] + rows["stuckMoves"]
            assert await page.locator(".rows > li").count() == len(every)
            await page.locator("#stuck .rows summary").first.click()
            await expect(page.locator("#stuck .rules").first).to_be_visible()
            await page.locator("#more-filter summary").click()
            await page.locator("[name=state]").select_option("external")
            await page.get_by_role("button", name="Show").click()
            assert "state=external" in page.url
            delays = page.locator(".rows [data-field=delay]")
            assert await delays.all_inner_texts() == ["external"]

    async def test_any_vm_is_found_by_its_name(self, demo: Still, browser: Browser) -> None:
        """Any VM is found by a part of its name."""
        async with visit(browser, demo.query) as page:
            await page.locator("[name=vm]").fill("p/steady")
            await page.keyboard.press("Enter")
            await page.locator("#found-rows a").first.click()
            await page.wait_for_selector("#vm-title")
            assert "/vmis/shop/steady-" in page.url

    async def test_a_vm_that_has_gone_has_a_page(self, demo: Still, browser: Browser) -> None:
        """For an unknown VM, browsers get a page, and programs get JSON."""
        url = f"{demo.query}/vmis/bank/gone"
        async with visit(browser, url, faults=("404 (Not Found)",)) as page:
            await page.clock.install()
            await page.reload()
            assert await text(page, "#problem") == "no VMI 'gone' in namespace 'bank'."
            assert await axe_faults(page) == ""
            await page.clock.run_for(PERIOD)
            await expect(page.locator("#live-status")).to_have_text("Refreshes every 5 s")

        assert (await demo.get("/vmis/bank/gone"))["title"] == "No such VMI"

    async def test_nothing_else_may_run(self, demo: Still, browser: Browser) -> None:
        """Scripts and styles injected into the page do not run."""
        provoked = ("Content Security Policy",)
        async with visit(browser, demo.query, faults=provoked) as page:
            ran = await page.evaluate(
                """() => {
                    const script = document.createElement("script");
                    script.textContent = "window.ran = true";
                    document.body.append(script);
                    document.body.setAttribute("style", "opacity: 0.5");
                    return [window.ran === true, getComputedStyle(document.body).opacity];
                }"""
            )
        assert ran == [False, "1"]


class TestRefresh:
    """The page refreshes itself."""

    async def test_it_keeps_what_the_reader_has_done(self, demo: Still, browser: Browser) -> None:
        """A refresh keeps focus, scroll position, opened details and typed text."""
        async with visit(browser, demo.query) as page:
            await page.clock.install()
            await page.reload()
            await page.locator("#blocked-rows details summary").first.click()
            await page.locator("[name=vm]").fill("nod")
            link = page.locator("#blocked-rows a").nth(2)
            await link.focus()
            await page.evaluate("document.activeElement.mine = true")
            place = "document.activeElement.getBoundingClientRect().top"
            before = await page.evaluate(place)
            assert await page.evaluate("scrollY") > 0
            later = await self._let_pass(demo, 2.0)
            await page.clock.run_for(PERIOD)
            await expect(page.locator("#as-of time")).to_have_attribute("datetime", later)

            assert await page.evaluate("document.activeElement.mine === true")
            assert await page.locator("#blocked-rows details[open]").count() == 1
            assert await page.locator("[name=vm]").input_value() == "nod"
            assert await page.evaluate(place) == pytest.approx(before, abs=1)
            api = await demo.get("/v1/blocked")
            shown = await page.locator("#blocked-rows .vm a").all_inner_texts()
            assert set(shown) == {f"{vmi['namespace']}/{vmi['name']}" for vmi in api["blocked"]}

    async def test_it_becomes_what_the_server_sends(self, demo: Still, browser: Browser) -> None:
        """After a refresh the page equals a reloaded one."""
        async with visit(browser, demo.query) as page:
            await page.clock.install()

            async def renews() -> bool | None:
                await page.reload()
                await page.evaluate(
                    """() => {
                        const body = document.querySelector("#blocked-rows tbody");
                        body.append(...[...body.children].reverse());
                        body.children[1].remove();
                        document.querySelector("#evacuations").remove();
                        document.querySelector("#verdict").textContent = "";
                    }"""
                )
                later = await self._let_pass(demo, 1.0)
                await page.clock.run_for(PERIOD)
                await expect(page.locator("#as-of time")).to_have_attribute("datetime", later)
                renewed = await page.locator("main").inner_html()
                await page.reload()
                return renewed == await page.locator("main").inner_html() or None

            # If a watch bookmark arrives between the refresh and the reload, the last contact
            # differs, and the test tries again.
            await poll(renews, what="a refreshed page that equals a reloaded page")

    async def test_it_can_be_paused(self, demo: Still, browser: Browser) -> None:
        """While paused or hidden the page sends no request; afterwards it refreshes at once."""
        async with visit(browser, demo.query) as page:
            await page.clock.install()
            await page.reload()
            asked: list[str] = []
            await page.get_by_role("button", name="Pause").click()
            # A refresh may have begun just before the click.
            page.on("request", lambda request: asked.append(request.url))
            await page.clock.run_for(3 * PERIOD)
            assert await text(page, "#live-status") == "Paused"
            assert asked == []
            async with page.expect_request(demo.query + "/"):
                await page.get_by_role("button", name="Resume").click()
            await expect(page.locator("#live-status")).to_have_text("Refreshes every 5 s")
            hide = """hidden => {
                Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }"""
            await page.evaluate(hide, True)  # noqa: FBT003
            asked.clear()
            await page.clock.run_for(3 * PERIOD)
            assert asked == []
            async with page.expect_request(demo.query + "/"):
                await page.evaluate(hide, False)  # noqa: FBT003

    async def test_it_says_when_nobody_answers(self, demo: Still, browser: Browser) -> None:
        """While the exporter is unreachable, the page keeps its data and time, and tries again."""
        provoked = ("ERR_INTERNET_DISCONNECTED",)
        async with visit(browser, demo.query, faults=provoked) as page:
            await page.clock.install()
            await page.reload()
            as_of = await page.locator("#as-of time").get_attribute("datetime")
            await page.context.set_offline(True)
            await page.clock.run_for(PERIOD)
            status = page.locator("#live-status")
            await expect(status).to_contain_text("Cannot reach the exporter")
            assert str(as_of)[11:19] in await text(page, "#live-status")
            assert await page.locator("#blocked-rows tbody tr").count() > 5
            await page.context.set_offline(False)
            await page.clock.run_for(PERIOD)
            await expect(status).to_have_text("Refreshes every 5 s")

    async def _let_pass(self, demo: Still, seconds: float) -> str:
        """Advance the demo's stopped clock by some seconds; returns its time."""
        assert demo.clock.stopped_at is not None
        demo.clock.stopped_at += seconds
        later: str = (await demo.get("/v1/status"))["asOf"]
        return later
