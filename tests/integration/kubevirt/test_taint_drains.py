"""Drains by KubeVirt's taint, with KubeVirt's own controllers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from exporter.engine.facts.model import DRAIN_TAINT
from exporter.engine.store.node_drains import DrainEnd
from tests.cluster.client import ApiError
from tests.cluster.resources import NODES
from tests.cluster.rig import Rig
from tests.cluster.versions import is_kubevirt_at_least
from tests.support.program import Program, program


NODE = "node-2"
KEY = "tainted/db1"
SETTINGS = {"stuck": {"after": "20s"}}
Prove = Callable[[str], None]

pytestmark = pytest.mark.skipif(
    not is_kubevirt_at_least("1.7"), reason="before KubeVirt 1.7 an evacuation cannot be cancelled"
)


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[Rig]:
    """KubeVirt's servers and three nodes."""
    async with Rig.opened() as rig:
        yield rig


@pytest.fixture(scope="module")
async def exporter(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Program]:
    """An exporter that watches the rig."""
    async with program(tmp_path_factory.mktemp("taint"), *rig.login, config=SETTINGS) as exporter:
        await exporter.ready()
        yield exporter


@asynccontextmanager
async def tainted(rig: Rig) -> AsyncIterator[None]:
    """The node has KubeVirt's drain taint during the block."""
    taint = {"key": DRAIN_TAINT, "value": "draining", "effect": "NoSchedule"}
    await rig.cluster.admin.merge(NODES, None, NODE, {"spec": {"taints": [taint]}})
    try:
        yield
    finally:
        await rig.cluster.admin.merge(NODES, None, NODE, {"spec": {"taints": None}})


def find_stuck(status: int, body: Any) -> bool:
    """Whether the only evacuation is stuck, and an attempt of it has failed."""
    rows = body["evacuations"]
    return bool(status == 200 and rows and rows[0]["stuck"] and rows[0]["failedAttempts"] >= 2)


async def test_a_taint_drains_a_node(rig: Rig, exporter: Program, prove: Prove) -> None:
    """A VM that fails to leave a tainted node is a stuck evacuation, until the taint is removed."""
    async with rig.vmi(KEY, "fails", node=NODE):
        async with tainted(rig):
            (evacuation,) = (await exporter.until("/v1/evacuations", find_stuck, within=180))[
                "evacuations"
            ]
            drained = await exporter.until(
                f"/v1/nodes/{NODE}", lambda _, body: body["drain"]["failing"] == 1
            )
            stuck = await exporter.sample("kubevirt_vmi_evacuation_stuck", node=NODE)
            assert await exporter.sample("kubevirt_node_drain_stuck", node=NODE) == 1
            scene = await rig.look(KEY)
            with pytest.raises(ApiError, match="has NodeDrainTaintKey") as refusal:
                await rig.cluster.cancel_evacuation("db1", "tainted", NODE)
        await exporter.until("/v1/evacuations", lambda _, body: not body["evacuations"])
        over = await exporter.until(f"/v1/nodes/{NODE}", lambda _, body: body["drain"] is None)
        ended = await exporter.sample(
            "kubevirt_eviction_exporter_drains_total", outcome=DrainEnd.CANCELLED
        )

    prove(
        f"rig: drain by a taint: {evacuation['state']}, stuck by"
        f" {' and '.join(evacuation['stuckBy'])}, failed attempts:"
        f" {evacuation['failedAttempts']}; {evacuation['nextStep']}"
    )
    assert refusal.value.code == 400
    assert "evacuationNodeName" not in scene.vmi["status"]
    assert (evacuation["requestedThrough"], evacuation["source"], evacuation["cancel"]) == (
        "taint",
        "other",
        None,
    )
    assert (drained["canBeEmptied"], drained["fails"], drained["drain"]["asked"]) == (False, 1, 1)
    assert (stuck, ended) == (1, 1)
    assert over["vmis"] == 1


async def test_a_vm_leaves_a_tainted_node(rig: Rig, exporter: Program) -> None:
    """When the last VM has left the tainted node, the drain has succeeded."""
    key = "leaves/db1"
    async with rig.vmi(key, "succeeds", node=NODE), tainted(rig):
        await rig.until(key, lambda scene: scene.vmi["status"]["nodeName"] != NODE, within=120)
        await exporter.until("/v1/evacuations", lambda _, body: not body["evacuations"])
        await exporter.until(f"/v1/nodes/{NODE}", lambda status, _: status == 404)
        assert (
            await exporter.sample(
                "kubevirt_eviction_exporter_drains_total", outcome=DrainEnd.SUCCEEDED
            )
            == 1
        )
