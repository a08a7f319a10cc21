"""EvictionRequests are observed, from what Kubernetes' controllers wrote: the whole program."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import VMIS, launcher_pod, vmi
from tests.cluster.resources import EVICTIONS, PODS
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage


RECORDED = Path(__file__).parents[1] / "data" / "evictions" / "moving.json"


def an_eviction(pod: dict[str, Any]) -> dict[str, Any]:
    """The recorded Eviction, for this pod."""
    (eviction, *_) = json.loads(RECORDED.read_text(encoding="utf-8"))["evictions"]
    place = pod["metadata"]
    target = {"pod": {"name": place["name"], "uid": place["uid"]}}
    metadata = {"name": f"pod-1-{place['name']}", "namespace": place["namespace"]}
    return {**eviction, "metadata": metadata, "spec": {"target": target}}


async def test_who_asks_for_a_vm_is_shown(simulated: SimulatedStage, tmp_path: Path) -> None:
    """The API and the metrics show who asks by EvictionRequests, and an end is counted."""
    namespace = await simulated.make_namespace()
    made = await simulated.admin.create(VMIS, vmi("db1", namespace))
    pod = await simulated.admin.create(PODS, launcher_pod(made))
    config = {"evictionRequests": {"mode": "observe", "deschedulers": ["example.com/drain"]}}
    async with exporting(simulated.url, tmp_path, **config) as exporter:
        eviction = await simulated.admin.create(EVICTIONS, an_eviction(pod))
        path = f"/v1/vmis/{namespace}/db1"
        answer = await exporter.until(path, lambda _, vm: vm["evictionRequest"] is not None)
        name, evicted = eviction["metadata"]["name"], {"type": "TargetEvicted", "status": "True"}
        await simulated.admin.merge_status(EVICTIONS, namespace, name, {"conditions": [evicted]})
        await exporter.until(path, lambda _, vm: vm["evictionRequest"] is None)
        ended = await exporter.sample(
            "kubevirt_eviction_exporter_eviction_requests_total",
            requester_kind="descheduler",
            outcome="evicted",
        )
    request = answer["evictionRequest"]
    assert request["requesters"] == [{"name": "example.com/drain", "intent": "Eviction"}]
    assert request["responder"] == "imperative-eviction.k8s.io/evictor"
    assert request["state"] == "Active"
    assert "Eviction triggered evacuation" in request["message"]
    assert ended == 1


@pytest.mark.parametrize(("mode", "is_missed"), [("observe", True), (None, False), ("off", False)])
async def test_an_api_that_is_not_served(
    simulated: SimulatedStage, tmp_path: Path, mode: str | None, *, is_missed: bool
) -> None:
    """Only an operator who asked for Evictions is told that they are not served."""
    simulated.server.answer(EVICTIONS.plural, 404)
    config = {"evictionRequests": {"mode": mode}} if mode else {}
    async with exporting(simulated.url, tmp_path, **config) as exporter:
        _, status = await exporter.get("/v1/status")
        if is_missed:
            status = await exporter.until("/v1/status", lambda _, seen: bool(seen["blindSpots"]))
        assert [*status["blindSpots"]] == ([EVICTIONS.plural] if is_missed else [])
        shown = {entry["resource"] for entry in status["resources"]}
        assert (EVICTIONS.plural in shown) is is_missed
