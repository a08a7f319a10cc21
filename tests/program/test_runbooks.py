"""A runbook, from a stuck evacuation to its step: as a page, as Markdown, and by the command."""

import re
from pathlib import Path

import aiohttp

from exporter.demo import shorten_settings
from exporter.server.page.render import PAGE_HEADERS
from tests.support.commands import run_command
from tests.support.program import program


SPEED = 5.0
_LINK = re.compile(r'<a href="(/runbooks/\w+)#(\w+)"[^>]* data-field="runbook">([^<]+)</a>')


async def test_a_stuck_vm_leads_to_its_step(tmp_path: Path) -> None:
    """The page's link opens the runbook at the step that `explain` and the API name."""
    config = dict(shorten_settings(SPEED))
    async with (
        program(tmp_path, "demo", "--speed", f"{SPEED:g}", config=config) as exporter,
        aiohttp.ClientSession() as session,
    ):
        await exporter.ready()
        listed = await exporter.until(
            "/v1/evacuations",
            lambda _, body: any(evacuation["stuck"] for evacuation in body["evacuations"]),
        )
        stuck = next(evacuation for evacuation in listed["evacuations"] if evacuation["stuck"])
        _, page = await exporter.get(f"/vmis/{stuck['namespace']}/{stuck['name']}")
        path, step, shown = _LINK.findall(page)[0]
        code, explained, _ = await run_command(
            "explain", "--url", exporter.query, f"{stuck['namespace']}/{stuck['name']}"
        )

        async with session.get(
            exporter.query + path, headers={"Accept": "text/markdown"}
        ) as answer:
            markdown = await answer.text()
        for listener in (exporter.query, exporter.metrics):
            async with session.get(listener + path) as answer:
                html = await answer.text()
                assert answer.headers.items() >= PAGE_HEADERS.items()
            assert f'id="{step}">{step}</h3>' in html
            assert "<script" not in html
            async with session.get(f"{listener}/runbooks") as answer:
                assert f'href="{path}"' in await answer.text()
            async with session.get(f"{listener}/runbooks/Unknown") as answer:
                assert answer.status == 404
                assert path.removeprefix("/runbooks/") in (await answer.json())["detail"]
        assert await exporter.end() == 0

    assert shown == f"{path.removeprefix('/runbooks/')}#{step}"
    assert (code, shown in explained) == (0, True)
    code, printed, _ = await run_command("runbook", shown)
    assert code == 0
    assert printed.startswith(f"### {step}\n")
    assert printed in markdown
    assert await run_command("runbook", shown.partition("#")[0]) == (0, markdown, "")


async def test_an_unknown_runbook_is_a_wrong_argument() -> None:
    """The command ends with 2, and names the runbooks that there are."""
    code, printed, errors = await run_command("runbook", "Unknown")

    assert (code, printed) == (2, "")
    assert "no runbook 'Unknown', only KubeVirtDeschedulerDoesNotAsk, " in errors
