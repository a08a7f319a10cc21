"""Fuzz tests of the API, from its OpenAPI document, and of hostile objects and broken watches."""

import asyncio
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest

from tests.cluster import VMIS, poll, vmi
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage
from tests.support.program import Program, program
from tests.unit.kube.objects.test_kubevirt import raw


Prove: TypeAlias = Callable[[str], None]

REQUESTS = "kubevirt_eviction_exporter_request_duration_seconds_count"
REJECTED = "kubevirt_eviction_exporter_rejected_requests_total"
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("examples", "at_least"),
    [
        pytest.param(4, 60, id="small"),
        pytest.param(3000, 10_000, id="soak", marks=[SOAK, pytest.mark.timeout(7000)]),
    ],
)
async def test_the_api_keeps_its_own_document(
    tmp_path: Path, prove: Prove, examples: int, at_least: int
) -> None:
    """Schemathesis finds no 5xx, and no answer that differs from the OpenAPI document."""
    async with program(tmp_path, "demo", "--speed", "5") as exporter:
        await exporter.ready()
        schemathesis = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{exporter.query}/openapi.json", "--checks", "all", "--seed", "1"),
            *("--phases", "examples,coverage,fuzzing,stateful", "-n", str(examples)),
            *("--generation-database", "none", "--no-color", "--continue-on-failure"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await schemathesis.communicate())[0].decode()
        assert schemathesis.returncode == 0, output
        asked = await exporter.sample(REQUESTS)
        failed = [await exporter.sample(REJECTED, status=str(status)) for status in range(500, 503)]
    assert asked >= at_least
    assert not any(failed)
    prove(f"schemathesis: {asked:.0f} requests, no 5xx, no answer against the schema")


def hostile() -> dict[str, dict[str, Any]]:
    """Malicious VMIs, by the kind of attack."""
    names = {"namespace": "shop", "name": "evil", "uid": "evil-1"}
    deep: Any = "x"
    for _ in range(300):
        deep = {"a": [deep]}
    condition = {"type": "LiveMigratable", "status": "True"}
    return {
        "a-million-conditions": {"metadata": names, "status": {"conditions": [condition] * 10**6}},
        "deep": {"metadata": {**names, "annotations": {"x": deep}}, "spec": deep},
        "a-name-of-a-megabyte": {"metadata": {**names, "name": "x" * 2**20}},
        "a-name-with-controls": {"metadata": {**names, "name": 'a\n# HELP x\r"\\{}\x1b[31m'}},
        "a-name-of-other-planes": {"metadata": {**names, "name": "\U0001f4a9\u202e\u0000"}},
        "a-node-like-a-series": {
            "metadata": names,
            "status": {"nodeName": 'n"} 1\nfake_metric{x="', "evacuationNodeName": "n\n"},
        },
        "an-instant-out-of-time": {
            "metadata": names,
            "status": {
                "migrationState": {
                    "migrationUid": "m",
                    "startTimestamp": "0000-00-00T99:99:99Z",
                    "endTimestamp": "9999-12-31T23:59:59.999999999999999999Z",
                }
            },
        },
        "numbers-for-text": {"metadata": {**names, "uid": 10**300}, "status": {"nodeName": 1e308}},
    }


async def test_a_cluster_that_means_harm(simulated: SimulatedStage, tmp_path: Path) -> None:
    """Malicious objects are accepted, or refused and counted; other VMs keep their verdicts."""
    namespace = await simulated.make_namespace()
    for name in ("good-1", "good-2"):
        await simulated.admin.create(VMIS, vmi(name, namespace))
    async with exporting(simulated.url, tmp_path) as exporter:
        for name, value in hostile().items():
            line = b'{"type":"ADDED","object":%s}\n' % raw(value)
            assert simulated.server.inject(line, VMIS.plural), name
        await simulated.admin.create(VMIS, vmi("last", namespace))
        for name in ("good-1", "good-2", "last"):
            await exporter.until_verdict(namespace, name, "filter", None)
        status, text = await exporter.get("/metrics")
        assert status == 200
        assert all(is_a_sample(line) for line in text.splitlines()), text
        assert (await exporter.get("/v1/evacuations"))[0] == 200
        assert (await exporter.get("/v1/blocked"))[0] == 200
        assert await exporter.end() == 0
        assert "Traceback" not in exporter.output


def is_a_sample(line: str) -> bool:
    """Whether a line of a scrape is a comment or a sample of an expected metric."""
    return line.startswith(("# HELP ", "# TYPE ", "descheduler_kubevirt_", "kubevirt_", "process_"))


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [
        pytest.param(20, 3, id="small"),
        pytest.param(200, 180, id="soak", marks=[SOAK, pytest.mark.timeout(1200)]),
    ],
)
async def test_many_clients_while_the_watch_breaks(
    simulated: SimulatedStage, tmp_path: Path, prove: Prove, clients: int, seconds: float
) -> None:
    """Many clients get no error while the watch breaks, and memory does not leak."""
    namespace = await simulated.make_namespace()
    for number in range(200):
        await simulated.admin.create(VMIS, vmi(f"vm-{number}", namespace))
    async with exporting(simulated.url, tmp_path, limits={"connections": 1000}) as exporter:
        before = exporter.resident() // 2**20
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(ask(exporter, namespace, number, end))
                for number in range(clients)
            ]
            faults = tasks.create_task(break_streams(simulated, end))
        answered = sum(task.result() for task in asking)
        after = exporter.resident() // 2**20
        restarts = await exporter.sample(
            "kubevirt_eviction_exporter_watch_restarts_total",
            resource=VMIS.plural,
        )
        # There are fewer restarts than faults: after some failures the watch waits longer before it
        # tries again.
        assert restarts >= 2
        await poll(lambda: has_all(exporter, 200), what="all VMIs")
    assert answered > clients
    assert after < before + 150
    prove(
        f"load: {clients} clients for {seconds:.0f} s, {answered} answers without an error;"
        f" {faults.result()} faults; memory {before} MiB before, {after} MiB after"
    )


async def ask(exporter: Program, namespace: str, number: int, end: float) -> int:
    """Send random requests until the end; returns how many were answered, all with 200."""
    rng = random.Random(number)
    candidates = [{"namespace": namespace, "name": f"vm-{n}"} for n in range(200)]
    answered = 0
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            if rng.random() < 0.7:
                body = {"candidates": rng.sample(candidates, 20)}
                asked = session.post(exporter.query + "/v1/verdicts", json=body)
            else:
                path = rng.choice(["/v1/blocked?wait=1", "/v1/evacuations", "/metrics", "/readyz"])
                asked = session.get(exporter.query + path)
            async with asked as response:
                assert response.status == 200, await response.text()
                await response.read()
            answered += 1
    return answered


async def break_streams(stage: SimulatedStage, end: float) -> int:
    """Cut the streams; every third time expire all versions instead. Returns the fault count."""
    faults = 0
    while time.monotonic() < end or faults < 3:
        if faults % 3 == 2:
            await stage.force_gone()
        else:
            stage.server.cut()
        faults += 1
        await asyncio.sleep(0.7)
    return faults


async def has_all(exporter: Program, vmis: int) -> bool:
    """Whether this many VMIs are known."""
    return await exporter.sample("kubevirt_eviction_exporter_objects", resource=VMIS.plural) == vmis
