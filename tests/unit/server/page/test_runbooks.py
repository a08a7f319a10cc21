"""The pages of the runbooks."""

import re
from collections.abc import AsyncIterator

import pytest
from yarl import URL

from exporter.runbooks import NAMES, read_runbook
from exporter.server.page.render import PAGE_HEADERS
from exporter.server.page.runbooks import PUBLISHED, render_markdown
from tests.support.documents import ROOT, anchors
from tests.unit.server.api.test_handlers import ServedApi, opened
from tests.unit.server.page.test_render import Document


BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


@pytest.fixture
async def api() -> AsyncIterator[ServedApi]:
    """An API without VMs, over HTTP."""
    async with opened(ServedApi()) as served:
        yield served


def ids(page: Document) -> list[str]:
    """The ids of a page, in order."""
    return [tag.attributes["id"] or "" for tag in page.elements if "id" in tag.attributes]


def test_markdown_becomes_html() -> None:
    """Headings, lists, tables and blocks are HTML; the title is left out, and HTML is text."""
    html = render_markdown(
        "# Name\n\n**Do this** `now`:\n\n- one\n\n| a |\n|---|\n| b |\n\n"
        "```bash\nkubectl get pods # <x>\n```\n\n<script>alert(1)</script>\n"
    )

    assert "Name" not in html
    assert "<strong>Do this</strong> <code>now</code>" in html
    assert "<li>one</li>" in html
    assert "<td>b</td>" in html
    assert "kubectl get pods # &lt;x&gt;" in html
    assert "&lt;script&gt;" in html


def test_every_step_has_an_anchor() -> None:
    """Headings have GitHub's anchors, and the items of Mitigation are numbered."""
    html = render_markdown(
        "## Meaning\n\n- not this\n\n## Mitigation\n\n- one\n- two\n\n### no_contact\n\n- three\n\n"
        "### Cancel an evacuation\n"
    )

    assert re.findall(r'<(\w+) id="([^"]+)"', html) == [
        ("h2", "meaning"),
        ("h2", "mitigation"),
        ("li", "step-1"),
        ("li", "step-2"),
        ("h3", "no_contact"),
        ("li", "step-3"),
        ("h3", "cancel-an-evacuation"),
    ]


@pytest.mark.parametrize("name", NAMES)
async def test_a_browser_gets_a_page(api: ServedApi, name: str) -> None:
    """The page has the anchors of the Markdown, no script, and links that lead somewhere."""
    answer = await api.get(f"/runbooks/{name}", Accept=BROWSER)
    page = Document(answer.body.decode())
    identities = ids(page)
    document = ROOT / "exporter/runbooks" / f"{name}.md"

    assert answer.status == 200
    assert {header: answer.headers[header] for header in PAGE_HEADERS} == PAGE_HEADERS
    assert page.all("script") == []
    assert page.all("title")[0].text.startswith(name)
    assert len(identities) == len(set(identities))
    assert set(identities) >= anchors(document) - {name.lower()}
    for link in (element.attributes["href"] or "" for element in page.all("a")):
        path, _, anchor = link.partition("#")
        runbook = path.removeprefix("/runbooks/")
        if not path:
            assert anchor in identities
        elif runbook in NAMES:
            assert not anchor or anchor in anchors(document.with_name(f"{runbook}.md"))
        elif path.startswith(PUBLISHED):
            assert not anchor or anchor in anchors(ROOT / path.removeprefix(PUBLISHED))
        else:
            assert link in {"/", "/runbooks", "/metrics", "/readyz"}


async def test_a_program_gets_markdown(api: ServedApi) -> None:
    """A client that accepts text/markdown gets the file, and the list as Markdown."""
    name = "KubeVirtVMChurning"
    answer = await api.get(f"/runbooks/{name}", Accept="text/markdown")
    listed = await api.get("/runbooks", Accept="text/markdown")

    assert answer.headers["Content-Type"] == "text/markdown; charset=utf-8"
    assert answer.body.decode() == read_runbook(name)
    assert re.findall(r"\[(\w+)\]\((\w+)\.md\)", listed.body.decode()) == [
        (name, name) for name in NAMES
    ]


async def test_the_list_links_all(api: ServedApi) -> None:
    """/runbooks has a link to each runbook."""
    page = Document((await api.get("/runbooks", Accept=BROWSER)).body.decode())
    links = [link.attributes["href"] for link in page.all("a")]

    assert {f"/runbooks/{name}" for name in NAMES} <= set(links)


@pytest.mark.parametrize("name", ["Unknown", "KubeVirtVMChurning.md", "..%2Fx", "%ED%A0%80"])
async def test_an_unknown_name_is_answered_with_the_known_ones(api: ServedApi, name: str) -> None:
    """A browser gets the list as a page, and a program a problem; both name all runbooks."""
    url = URL(f"/runbooks/{name}", encoded=True)
    async with api.session.get(url, headers={"Accept": BROWSER}) as page:
        html = await page.text()
    problem = await api.get(f"/runbooks/{name}")

    assert (page.status, problem.status) == (404, 404)
    assert Document(html).text("runbook-title") == "No such runbook"
    assert problem.headers["Content-Type"].startswith("application/problem+json")
    assert problem.json["title"] == "No such runbook"
    for known in NAMES:
        assert f'href="/runbooks/{known}"' in html
        assert known in problem.json["detail"]
