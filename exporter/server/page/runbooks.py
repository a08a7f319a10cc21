"""The pages of the runbooks. Their Markdown is rendered once, when this module is imported."""

import re
from itertools import count, pairwise

from aiohttp import hdrs, web
from markdown_it import MarkdownIt
from markupsafe import Markup

from exporter.runbooks import NAMES, describe_unknown, read_runbook
from exporter.server.api.handlers import Service
from exporter.server.http.problems import Refusal
from exporter.server.page.handlers import answer_html
from exporter.server.page.render import PAGE_HEADERS, render_runbook


PUBLISHED = "https://github.com/kubevirt-eviction-exporter/exporter/blob/main/"
"""Where the other documents are, to which runbooks link."""
_UNKNOWN = "No such runbook"
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


async def answer_list(_service: Service, request: web.Request) -> web.Response:
    """GET /runbooks."""
    return _choose(request, _LIST, _LIST_PAGE)


async def answer_runbook(_service: Service, request: web.Request) -> web.Response:
    """GET /runbooks/{runbook}.

    A browser gets a page with the list for an unknown one. For others this raises `Refusal`.
    """
    name = request.match_info["runbook"]
    if name in _PAGES:
        return _choose(request, _TEXTS[name], _PAGES[name])
    if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
        return answer_html(_UNKNOWN_PAGE, 404)
    raise Refusal(404, _UNKNOWN, describe_unknown(name))


def _choose(request: web.Request, text: str, page: str) -> web.Response:
    """The Markdown for a client that accepts it, else the page."""
    if "text/markdown" not in request.headers.get(hdrs.ACCEPT, ""):
        return answer_html(page)
    return web.Response(
        text=text, content_type="text/markdown", charset="utf-8", headers=PAGE_HEADERS
    )


def render_markdown(text: str) -> Markup:
    """Markdown as HTML, without its title.

    Headings have the ids that GitHub gives them, and items of lists in Mitigation are `step-1` and
    so on. Links to other runbooks lead to their pages.
    """
    tokens = _MARKDOWN.parse(re.sub(r"^# .*", "", text))
    section, steps = "", count(1)
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", name_anchor(following.content))
            section = following.content if token.tag == "h2" else section
        elif token.type == "list_item_open" and section == "Mitigation":
            token.attrSet("id", f"step-{next(steps)}")
        for child in following.children or ():
            if child.type == "link_open":
                child.attrSet("href", _resolve(str(child.attrGet("href"))))
    html = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    return Markup(html)  # noqa: S704 (our own files)


def name_anchor(heading: str) -> str:
    """The id that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _resolve(link: str) -> str:
    """The URL of a link in a runbook."""
    link = re.sub(r"^(\w+)\.md", r"/runbooks/\1", link)
    return re.sub(r"^\.\./\.\./", PUBLISHED, link)


_LIST = "# Runbooks\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in NAMES)
_LIST_PAGE, _UNKNOWN_PAGE = (
    render_runbook(title, render_markdown(_LIST)) for title in ("Runbooks", _UNKNOWN)
)
_TEXTS = {name: read_runbook(name) for name in NAMES}
_PAGES = {name: render_runbook(name, render_markdown(text)) for name, text in _TEXTS.items()}
