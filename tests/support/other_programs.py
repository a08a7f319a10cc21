"""A metrics page with the metrics of other programs.

The programs are the descheduler with its plugin, the API server and node_exporter. The names and
labels are real; the numbers grow with each scrape.
"""

import time
from collections import Counter
from collections.abc import Sequence

from aiohttp import web


WEBHOOK = "evictions.kubevirt-eviction-exporter.io"
FAILURES = (
    'descheduler_kubevirt_verdicts_total{checkpoint="filter",outcome="unavailable"}',
    'descheduler_pods_evicted_total{namespace="a",node="n",profile="p",result="error",strategy="s"}',
    f'apiserver_admission_webhook_fail_open_count{{name="{WEBHOOK}",type="admit"}}',
)
"""The counters that grow while something is broken."""


class OtherPrograms:
    """Serves the page. If `broken`, evictions, the plugin and calls of the webhook fail."""

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self.broken = True
        self._nodes = nodes
        self._counts: Counter[str] = Counter()
        self._renewed = 0.0

    def write(self) -> str:
        """Write the page of the next scrape."""
        self._counts["descheduler_loop_duration_seconds_count"] += 1
        for name in FAILURES:
            self._counts[name] += self.broken
        if not self.broken:
            self._renewed = time.time()
        lines = [f"{name} {count}" for name, count in self._counts.items()]
        lines += [f"descheduler_kubevirt_snapshot_timestamp_seconds {self._renewed}"]
        for node in self._nodes:
            lines += self._describe(node)
        return "\n".join(lines) + "\n"

    async def answer(self, _request: web.Request) -> web.Response:
        """Answer GET /metrics."""
        return web.Response(text=self.write())

    def _describe(self, node: str) -> list[str]:
        """The metrics of node_exporter for a node."""
        loops = self._counts["descheduler_loop_duration_seconds_count"]
        instance = f'instance="{node}:9100"'
        return [
            f'node_uname_info{{{instance},nodename="{node}"}} 1',
            f"node_pressure_cpu_waiting_seconds_total{{{instance}}} {loops * 0.1}",
            f"node_pressure_memory_waiting_seconds_total{{{instance}}} {loops * 0.01}",
            f'node_cpu_seconds_total{{{instance},cpu="0",mode="idle"}} {loops * 0.7}',
        ]
