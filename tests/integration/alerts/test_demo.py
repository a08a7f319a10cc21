"""Tests of the output of `make alerts`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from alerts.demo import (
    CannotShow,
    answers,
    find_exporter,
    list_demos,
    name_alert,
    read_alerts,
    tell_changes,
)
from tests.support.serving import serving


def an_alert(state: str, **labels: str) -> dict[str, Any]:
    """An alert about a stuck evacuation, in the format of Prometheus."""
    return {
        "state": state,
        "labels": {"alertname": "KubeVirtEvacuationStuck", **labels},
        "annotations": {
            "description": "It does not leave.",
            "runbook_url": "https://example.org/runbooks/KubeVirtEvacuationStuck#capacity",
        },
    }


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"namespace": "shop", "name": "db1", "node": "n1"}, "KubeVirtEvacuationStuck shop/db1"),
        ({"node": "n1"}, "KubeVirtEvacuationStuck n1"),
        ({"resource": "pods"}, "KubeVirtEvacuationStuck pods"),
        ({}, "KubeVirtEvacuationStuck"),
    ],
)
def test_an_alert_is_named_by_what_it_is_about(labels: dict[str, str], name: str) -> None:
    """The name of an alert is followed by its VM, else its node, else its resource."""
    assert name_alert(an_alert("pending", **labels)) == name


def test_only_changes_are_told() -> None:
    """A line is printed when an alert becomes pending, fires, or ends after it has fired."""
    pending, firing = {"a": an_alert("pending")}, {"a": an_alert("firing")}
    shown: dict[str, Mapping[str, Any]] = {}

    def told(now: Mapping[str, Mapping[str, Any]]) -> list[str]:
        return list(tell_changes(shown, now, "http://127.0.0.1:9811"))

    assert told(pending) == ["pending  KubeVirtEvacuationStuck"]
    assert told({}) == []
    assert told(pending) == []
    assert told(firing) == [
        "firing   KubeVirtEvacuationStuck",
        "         It does not leave.",
        "         http://127.0.0.1:9811/runbooks/KubeVirtEvacuationStuck#capacity",
    ]
    assert told(firing) == []
    assert told({}) == ["over     KubeVirtEvacuationStuck"]
    assert told(pending) == ["pending  KubeVirtEvacuationStuck"]


async def test_a_prometheus_is_asked() -> None:
    """Alerts are read from Prometheus and sorted by name. An error page is not an answer."""
    alerts = [an_alert("firing", node="n2"), an_alert("pending", node="n1")]

    async def list_alerts(_: web.Request) -> web.Response:
        return web.json_response({"data": {"alerts": alerts}})

    async def fail(_: web.Request) -> web.Response:
        return web.Response(text="Error opening React index.html: no such file or directory")

    app = web.Application()
    app.router.add_get("/api/v1/alerts", list_alerts)
    app.router.add_get("/alerts", fail)
    async with serving(app) as url, aiohttp.ClientSession(url) as session:
        firing = await read_alerts(session)

        assert [alert["labels"]["node"] for alert in firing.values()] == ["n1", "n2"]
        assert await answers(f"{url}/api/v1/alerts")
        assert not await answers(f"{url}/alerts")
        assert not await answers(f"{url}/nothing")
    assert not await answers(f"{url}/api/v1/alerts")


async def test_the_demo_that_runs_is_found(tmp_path: Path) -> None:
    """Of the demos that have run, the newest that answers is found; if none does, that is said."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    def record(name: str, url: str, started: float) -> None:
        file = tmp_path / name / "metrics"
        file.parent.mkdir()
        file.write_text(url)
        os.utime(file, (started, started))

    with pytest.raises(CannotShow, match=r"no demo has run here.*: run `make run`"):
        await find_exporter(list_demos(tmp_path))
    record("127.0.0.1-1", "http://0.0.0.0:1", 300.0)
    with pytest.raises(CannotShow, match=r"no demo answers \(http://127\.0\.0\.1:1\)"):
        await find_exporter(list_demos(tmp_path))
    app = web.Application()
    app.router.add_get("/readyz", answer)
    async with serving(app) as older, serving(app) as newer:
        record("older", older, 100.0)
        record("newer", newer, 200.0)
        assert await find_exporter(list_demos(tmp_path)) == newer
