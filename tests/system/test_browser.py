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

from tests.cluster import poll
from tests.generate.rules import RUNBOOK_BASE
from tests.generate.screenshots import FOLDER, SHOTS, Shot, read_words
from tests.support.browser import NoChromium, Still, chromium, standing_demo


PERIOD = 5_000
"""Milliseconds between two refreshes."""
READ_ROWS = """selector => [...document.querySelectorAll(selector)].map(row => ({
    ...row.dataset,
    ...Object.fromEntries([...row.querySelectorAll("[data-field]")].map(field => [
        field.dataset.field,
        field.querySelector("time")?.getAttribute("datetime") ?? field.value ?? field.textContent,
    ])),
    entries: [...row.querySelectorAll(".entry")].map(entry => [
        entry.querySelector("[data-field=checkpoint]").textContent,
        entry.querySelector("[data-field=reason]").textContent,
    ]),
    rules: [...row.querySelectorAll(".rules dd")].map(rule => rule.textContent),
    holding: [...row.querySelectorAll(".rules dt:has(strong) code")].map(one => one.textContent),
    why: [...row.querySelectorAll("[data-field=why]")].map(one => one.textContent),
    badge: row.querySelector(".badge")?.textContent ?? "",
    link: row.querySelector("a")?.getAttribute("href"),
    bars: row.querySelectorAll(".line .bar, #lanes .bar").length,
    failures: row.querySelectorAll(".line path.failed, #lanes path.failed").length,
    progress: row.querySelector("progress")?.value ?? null,
    whole: row.querySelector("progress")?.max ?? null,
}))"""


def words(evacuation: dict[str, Any]) -> list[str]:
    """Each reason of an evacuation, the cause first."""
    others = [one for one in evacuation["why"] if one != evacuation["cause"]]
    said = [evacuation["cause"], *others] if evacuation["cause"] else others
    return [": ".join(filter(None, (one["reason"], one["message"]))) for one in said]


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
        assert {one.split("/", 3)[2] for one in asked if not one.startswith("data:")} == {origin}
        assert [one for one in faults if not any(part in one for part in expected)] == []
    finally:
        await context.close()


async def rows(page: Page, selector: str) -> list[dict[str, Any]]:
    """The rows of a table, each with its cells by field."""
    found: list[dict[str, Any]] = await page.evaluate(READ_ROWS, selector)
    return found


async def text(page: Page, selector: str) -> str:
    """The text of an element, with single spaces."""
    return " ".join((await page.locator(selector).inner_text()).split())


async def axe_faults(page: Page) -> str:
    """The faults that axe-core finds in the page."""
    results = await Axe().run(page)
    return str(results.generate_report()) if results.violations_count else ""


class TestTheSame:
    """The page shows what the API answers at the same time."""

    async def test_the_evacuations(self, demo: Still, browser: Browser) -> None:
        """The page has every evacuation of the API, in order, with its fields."""
        api = await demo.get("/v1/evacuations")
        async with visit(browser, demo.query) as page:
            shown = await rows(page, "#evacuation-rows tbody tr")
            as_of = await page.locator("#as-of time").get_attribute("datetime")

        assert as_of == api["asOf"]
        assert len(shown) == len(api["evacuations"]) > 5
        stuck_first = sorted(api["evacuations"], key=lambda one: not one["stuck"])
        for row, one in zip(shown, stuck_first, strict=True):
            vmi = await demo.get(f"/v1{row['link']}")
            verdicts = (vmi["verdicts"]["filter"], vmi["verdicts"]["preEviction"])
            backoff, attempt, cancel = one["backoff"], one["attempt"], one["cancel"]
            expected = {
                "namespace": one["namespace"],
                "name": one["name"],
                "node": one["node"] or "no node",
                "state": one["state"],
                "requestedAt": one["requestedAt"],
                "source": one["source"],
                "requestedBy": one["requestedBy"] and one["requestedBy"]["user"],
                "evictionStrategy": one["evictionStrategy"] or None,
                "failedAttempts": str(one["failedAttempts"]),
                "nextStep": one["nextStep"],
                "why": words(one),
                "reason": next((v["reason"] for v in verdicts if v["reason"]), None),
                "stuckBy": ", ".join(one["stuckBy"]) or None,
                "nextTryAt": backoff and backoff["nextTryAt"],
                "backoff": backoff and str(backoff["seconds"]),
                "phase": attempt and (attempt["phase"] or "new"),
                "command": one["command"],
                "runbook": one["runbook"],
                "cancel": cancel and cancel["command"],
                "rules": [rule["why"] for rule in vmi["rules"]],
                "holding": [rule["rule"] for rule in vmi["rules"] if rule["blocks"]],
            }
            assert {key: row.get(key) for key in expected} == expected
            assert ("diverged" in row) is one["diverged"]
            assert ("Stuck by" in row["badge"]) is one["stuck"]
            assert_drawn(row, vmi)

    async def test_the_page_of_one_vm(self, demo: Still, browser: Browser) -> None:
        """The page of a VM has what the API answers about it."""
        (stuck, *_) = (await demo.get("/v1/evacuations"))["evacuations"]
        vmi = await demo.get(f"/v1/vmis/{stuck['namespace']}/{stuck['name']}")
        async with visit(browser, demo.query) as page:
            await page.locator("#evacuation-rows a").first.click()
            await page.wait_for_selector("#vm-title")
            (shown,) = await rows(page, "main")
            assert await text(page, "#vm-title") == f"{stuck['namespace']}/{stuck['name']}"
            assert await axe_faults(page) == ""

        one = vmi["evacuation"]
        expected = {
            "node": vmi["node"],
            "phase": vmi["phase"],
            "state": one["state"],
            "requestedAt": one["requestedAt"],
            "failedAttempts": str(one["failedAttempts"]),
            "nextStep": one["nextStep"],
            "why": words(one),
            "rules": [rule["why"] for rule in vmi["rules"]],
        }
        assert {key: shown.get(key) for key in expected} == expected
        assert_drawn(shown, vmi)

    async def test_a_drawn_migration_leads_to_its_row(self, demo: Still, browser: Browser) -> None:
        """A click on a migration of the drawing leads to its row, by a link that can be shared."""
        vms = (await demo.get("/v1/blocked"))["blocked"]
        path = next(
            f"/vmis/{one['namespace']}/{one['name']}" for one in vms if one["reason"] == "cooldown"
        )
        last = (await demo.get(f"/v1{path}"))["migrations"][-1]["uid"]
        async with visit(browser, demo.query + path) as page:
            await page.locator("#lanes a .bar").last.click()
            assert page.url.endswith(f"{path}#m-{last}")
            assert await page.locator("tr:target").get_attribute("id") == f"m-{last}"


def assert_drawn(row: dict[str, Any], vmi: dict[str, Any]) -> None:
    """The timeline has a bar for each migration and a mark for each failure."""
    assert row["bars"] == len(vmi["migrations"])
    failed = [one for one in vmi["migrations"] if one["outcome"] == "failed"]
    assert row["failures"] == len(failed)


class TestLooks:
    """Accessibility, and use without JavaScript."""

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 360])
    async def test_it_is_accessible(
        self, demo: Still, browser: Browser, scheme: Any, width: int
    ) -> None:
        """axe-core finds no fault: light or dark, wide or narrow, with all details open."""
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

    async def test_the_page_of_a_vm_leads_back(self, demo: Still, browser: Browser) -> None:
        """On a phone, too, the page of a VM has a link to all VMs."""
        moved = (await demo.get("/v1/blocked"))["blocked"][0]
        url = f"{demo.query}/vmis/{moved['namespace']}/{moved['name']}"
        async with visit(browser, url, viewport={"width": 360, "height": 800}) as page:
            await page.get_by_role("link", name="All VMs").click()
            await page.wait_for_selector("#evacuation-rows")

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
            evacuations = (await demo.get("/v1/evacuations"))["evacuations"]
            first = next(one for one in evacuations if one["stuck"])

        path = f"/vmis/{first['namespace']}/{first['name']}"
        assert reached[:6] == ["#main", "live-pause", "verdict", "vm", "button", "summary"]
        book = f"{RUNBOOK_BASE}/{first['runbook']}.md"
        assert reached[6:11] == [path, f"/?node={first['node']}#drain", "button", book, "summary"]
        assert "unseen" not in reached

    async def test_a_button_copies_the_command(self, demo: Still, browser: Browser) -> None:
        """Each command has a button that copies it, and the page says so."""
        clipboard = ["clipboard-read", "clipboard-write"]
        async with visit(browser, demo.query, permissions=clipboard) as page:
            command = await page.locator("[data-field=command]").first.text_content()
            await page.get_by_role("button", name="Copy the command").first.click()
            await expect(page.locator("#live-status")).to_have_text("Copied the command")
            assert await page.evaluate("navigator.clipboard.readText()") == command

    async def test_it_works_without_javascript(self, demo: Still, browser: Browser) -> None:
        """Without JavaScript everything works except the refresh, and the page says so."""
        async with visit(browser, demo.query, java_script_enabled=False) as page:
            await expect(page.locator("#live-status")).to_have_text("Reload to update.")
            await expect(page.locator("#live-pause")).to_be_hidden()
            await expect(page.locator(".copy").first).to_be_hidden()
            assert await page.locator("#evacuation-rows tbody tr").count() > 5
            await page.locator("#evacuation-rows summary").first.click()
            await expect(page.locator("#evacuation-rows .rules").first).to_be_visible()
            await page.locator("#more-filter summary").click()
            await page.locator("[name=state]").select_option("external")
            await page.get_by_role("button", name="Show").click()
            assert "state=external" in page.url
            states = page.locator("#evacuation-rows [data-field=state]")
            assert await states.all_inner_texts() == ["external"]

    async def test_the_filter_filters(self, demo: Still, browser: Browser) -> None:
        """Enter applies the filter, the form still shows it afterwards, and a link removes it."""
        async with visit(browser, demo.query) as page:
            total = await page.locator("#blocked-rows tbody tr").count()
            await page.locator("#more-filter summary").click()
            await page.locator("[name=namespace]").fill("bank")
            await page.keyboard.press("Enter")
            await page.wait_for_url("**namespace=bank**")
            shown = await rows(page, "#blocked-rows tbody tr")
            assert {row["namespace"] for row in shown} == {"bank"}
            assert 0 < len(shown) < total
            assert await page.locator("[name=namespace]").input_value() == "bank"
            await page.locator("#clear").click()
            await expect(page.locator("#blocked-rows tbody tr")).to_have_count(total)

    async def test_any_vm_is_found_by_its_name(self, demo: Still, browser: Browser) -> None:
        """Any VM is found by a part of its name."""
        async with visit(browser, demo.query) as page:
            await page.locator("[name=vm]").fill("p/steady")
            await page.keyboard.press("Enter")
            await page.locator("#found-rows a").first.click()
            await page.wait_for_selector("#vm-title")
            assert "/vmis/shop/steady-" in page.url

    async def test_no_column_breaks_a_found_vm(self, demo: Still, browser: Browser) -> None:
        """The found VMs are in columns, whatever the width, and each VM is in one of them."""
        async with visit(browser, f"{demo.query}/?vm=-") as page:
            for width in (700, 1000, 1300):
                await page.set_viewport_size({"width": width, "height": 800})
                pieces = await page.evaluate(
                    """() => [...document.querySelectorAll("#found-rows li")]
                        .map(one => one.getClientRects().length)"""
                )
                assert set(pieces) == {1}, width

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
            shown = await rows(page, "#blocked-rows tbody tr")
            assert {(row["namespace"], row["name"]) for row in shown} == {
                (e["namespace"], e["name"]) for e in api["blocked"]
            }

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
