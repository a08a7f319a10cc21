"""The what-if reads past migrations from a real Prometheus."""

import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import pytest

from exporter.credentials import CannotAsk
from exporter.engine.facts.model import Outcome
from exporter.whatif.account import BUILTIN
from exporter.whatif.prometheus import (
    ENDS,
    FAILED,
    STARTS,
    SUCCEEDED,
    Prometheus,
    fetch,
    to_events,
)
from tests.cluster import find_binary
from tests.integration.alerts.live import Prometheus as PrometheusServer
from tests.support.builders import NOW
from tests.support.replaying import play


HOUR = 3600.0


def _samples(began: float, clusters: tuple[str, ...]) -> Iterator[str]:
    """Three hours of a VM with two successful evacuations and a failed one.

    The samples are the same in each cluster; "" means no label.
    """
    lives = [
        ("kubevirt-evacuation-a", 600, 660, "succeeded", 1000),
        ("kubevirt-evacuation-b", 1000, 1090, "succeeded", 7200),
        ("kubevirt-evacuation-c", 7200, 7500, "failed", 10800),
    ]
    for metric in (STARTS, ENDS, SUCCEEDED, FAILED):
        yield f"# TYPE {metric} gauge"
        for cluster, (name, start, end, status, gone) in product(clusters, lives):
            place = f"cluster={json.dumps(cluster)}," * bool(cluster) + 'namespace="shop"'
            for at in range(0, 10800, 60):
                labels = f'{place},name="db1",node="n1",migration_name="{name}"'
                by_vmim = f'{place},vmi="db1",vmim="{name}"'
                if metric == STARTS and start <= at < gone:
                    yield f"{metric}{{{labels}}} {began + start:.0f} {began + at:.0f}"
                elif metric == ENDS and end <= at < gone:
                    ended = f'{labels},status="{status}"'
                    yield f"{metric}{{{ended}}} {began + end:.0f} {began + at:.0f}"
                elif metric.endswith(status) and end <= at:
                    yield f"{metric}{{{by_vmim}}} 1 {began + at:.0f}"
    yield "# EOF"


@asynccontextmanager
async def remembering(
    directory: Path, began: float, *, clusters: tuple[str, ...] = ("",)
) -> AsyncIterator[str]:
    """A real Prometheus that has these samples."""
    file = directory / "past.om"
    file.write_text("\n".join(_samples(began, clusters)) + "\n")
    subprocess.run(
        [
            str(find_binary("promtool")),
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            str(file),
            str(directory / "prometheus"),
        ],
        check=True,
        capture_output=True,
    )
    async with PrometheusServer(directory, {"groups": []}, targets=[]) as server:
        yield server.url


async def test_a_real_prometheus_tells_what_happened(tmp_path: Path) -> None:
    """In a replay from a real Prometheus the cooldown refuses the second of two evictions."""
    began = (time.time() - 6 * HOUR) // 60 * 60
    seen: list[float] = []
    async with remembering(tmp_path, began) as url:
        spans = await fetch(
            Prometheus(url), began, began + 3 * HOUR, step=60.0, progress=seen.append
        )

    assert seen == [began + 3 * HOUR]
    assert {name: (s.start, s.end, s.outcome) for (_, name), s in spans.items()} == {
        "kubevirt-evacuation-a": (began + 600, began + 660, Outcome.SUCCEEDED),
        "kubevirt-evacuation-b": (began + 1000, began + 1090, Outcome.SUCCEEDED),
        "kubevirt-evacuation-c": (began + 7200, began + 7500, Outcome.FAILED),
    }
    events = list(to_events(spans, began, began + 3 * HOUR))
    ours, none = play(events, [BUILTIN["ours"], BUILTIN["none"]]).accounts
    assert (ours.allowed, ours.blocked.total(), ours.migrations.ended) == (2, 1, 2)
    assert (none.allowed, none.migrations.ended, none.migrations.failed) == (3, 3, 1)


async def test_several_clusters_are_not_mixed(tmp_path: Path) -> None:
    """If Prometheus has several clusters, one must be chosen, because VMs may have equal names."""
    began = (time.time() - 6 * HOUR) // 60 * 60
    async with remembering(tmp_path, began, clusters=("", 'east "1"')) as url:
        with pytest.raises(CannotAsk, match=r'clusters \("", "east \\"1\\""\): .*--cluster'):
            await fetch(Prometheus(url), began, began + 3 * HOUR, step=60.0)
        for cluster in ("", 'east "1"'):
            place = Prometheus(url, cluster=cluster)
            assert len(await fetch(place, began, began + 3 * HOUR, step=60.0)) == 3
        with pytest.raises(CannotAsk, match="does it scrape KubeVirt"):
            await fetch(Prometheus(url, cluster="west"), began, began + 3 * HOUR, step=60.0)


async def test_what_prometheus_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    """An error of Prometheus is reported with its message."""
    async with remembering(tmp_path, (time.time() - 6 * HOUR) // 60 * 60) as url:
        with pytest.raises(CannotAsk, match=r"400 .*zero or negative"):
            await fetch(Prometheus(url), NOW, NOW, step=0.0)
