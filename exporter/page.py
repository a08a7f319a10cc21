"""The page at `/`: whether this exporter can be trusted now, and where to look further."""

from html import escape

from msgspec import Struct

from exporter import __version__
from exporter.health import Staleness


class Summary(Struct, frozen=True, kw_only=True):
    """What the page says; `blocked` counts VMIs."""

    ready: bool
    staleness: Staleness
    waiting_for: list[str]
    refused: dict[str, str]
    observed_at: str | None
    vmis: int
    blocked: int


def render_page(summary: Summary) -> str:
    """The page as HTML, every text from outside escaped."""
    rows = [
        ("Version", __version__),
        ("State", _state(summary)),
        ("Last contact with the API server", summary.observed_at or "none yet"),
        ("VMIs", str(summary.vmis)),
        ("VMIs that may not be evicted now", str(summary.blocked)),
        *((f"Runs without {resource}", why) for resource, why in summary.refused.items()),
    ]
    table = "\n".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return _PAGE.format(table=table)


def _state(summary: Summary) -> str:
    if not summary.ready:
        return f"not ready: waiting for {', '.join(summary.waiting_for)}"
    match summary.staleness:
        case Staleness.FRESH:
            return "synced"
        case Staleness.STALE:
            return "stale: the API server has not been heard of lately"
        case Staleness.DEAD:
            return "dead: only cooldowns still block"


_PAGE = """<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<title>KubeVirt eviction exporter</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto;
  padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .25rem 1rem .25rem 0; vertical-align: top; }}
th {{ font-weight: 600; }}
</style>
</head>
<body>
<h1>KubeVirt eviction exporter</h1>
<p>Which VMs must not be moved now, and which evacuations are stuck.</p>
<table>
{table}
</table>
<p><a href="/metrics">/metrics</a> for Prometheus, <a href="/readyz">/readyz</a> and
<a href="/livez">/livez</a> for probes. The query listener also serves
<code>/v1/verdicts</code>, <code>/v1/blocked</code>,
<code>/v1/vmis/NAMESPACE/NAME</code>, <code>/v1/evacuations</code> and
<code>/openapi.json</code>.</p>
</body>
</html>
"""
