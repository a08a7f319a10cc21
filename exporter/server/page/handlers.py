"""The HTTP handlers of the status page and of the page of one VM.

They are imported when a page is first opened, because importing Jinja2 and compiling the templates
takes 0.2 s. Filtering and rendering take 100 ms with 10,000 blocked VMs. They run in slices, so
that verdicts are answered in between. If a thread did this, a verdict would wait longer: Linux may
run something else for 20 ms while that thread has the interpreter's lock.
"""

from collections.abc import Mapping
from types import MappingProxyType

from aiohttp import hdrs, web

from exporter.server.api.handlers import Service
from exporter.server.http.problems import Refusal
from exporter.server.page.model import build_page
from exporter.server.page.render import PAGE_HEADERS, render_page, render_problem, render_vm
from exporter.server.page.tables import (
    build_tables,
    read_filter,
    search_vms,
    summarize_blocked,
)
from exporter.tasks import complete, run_in_slices


PIECES = 100
"""How many pieces of a page are rendered without yielding."""


async def answer_page(
    service: Service, request: web.Request, *, named: bool, linked: bool
) -> web.Response:
    """GET /. `named`: the page names VMs. `linked`: the page links to the API."""
    entries = (await service.blocked.read(None)).entries if service.health.ready else []
    filters = read_filter(request.query)
    blocked = await complete(summarize_blocked(entries, filters))
    searches = named and (filters.vm or filters.namespace)
    vmis = service.store.vmis() if searches else []
    searched = await complete(search_vms(vmis, filters))
    snapshot = await service.take_snapshot()
    described = await service.describe_evacuations(snapshot)
    count = await service.count_outcomes(snapshot)
    forecasts = await service.forecast_nodes(count, {})
    tables = build_tables(blocked, filters, described, forecasts, named=named)
    page = await build_page(
        service,
        blocked,
        filters,
        service.clock(),
        described=described,
        tables=tables,
        searched=searched,
        named=named,
    )
    text: list[str] = []
    pieces = render_page(page, service.links, linked=linked)
    await run_in_slices(map(text.append, pieces), most=PIECES)
    return answer_html("".join(text))


async def answer_vm_page(service: Service, request: web.Request, *, linked: bool) -> web.Response:
    """GET /vmis/{namespace}/{name}. `linked`: the page links to the API.

    A browser gets a page for an unknown VM, too. For other clients this raises `Refusal`.
    """
    try:
        return answer_html(render_vm(service.explain(request), service.links, linked=linked))
    except Refusal as refusal:
        if "text/html" not in request.headers.get(hdrs.ACCEPT, ""):
            raise
        text = render_problem(refusal.problem, service.clock())
        return answer_html(text, refusal.problem.status, refusal.headers)


def answer_html(
    text: str, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
) -> web.Response:
    """The response with a page."""
    response = web.Response(
        text=text,
        status=status,
        content_type="text/html",
        charset="utf-8",
        headers={**PAGE_HEADERS, **headers},
    )
    response.enable_compression()
    return response
