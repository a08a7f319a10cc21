"""Every panel shows something: a real Prometheus, the real program, a cluster in which it happens.

The cluster is the demo's, served by this process, so that what a healthy one never shows can be
made to happen: an object that cannot be read, a watch that breaks, a resource that is refused, a
pod that loses its mark. The policy is the production one. Prometheus scrapes the program twice,
with honorLabels and without, as two jobs.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from dashboards.build import ONE_VM, OVERVIEW
from exporter.demo import objects, shorten_settings
from exporter.demo.objects import Object
from exporter.demo.store import PODS
from tests.cluster import find_binary, poll
from tests.cluster.ports import free_port
from tests.cluster.processes import Process
from tests.cluster.users import open_kubeconfig
from tests.support.dashboards import Query, panels, variables
from tests.support.faulty_apiserver import FaultyDemo
from tests.support.program import Program, program


RUN_SECONDS = 130
"""An evacuation counts as diverged two minutes after its pod has lost its mark."""
SPEED = 3.0
HONORED, RENAMED = "exporter", "exporter-renamed"
SCRAPE_LABELS = {"namespace": "monitoring", "node": "infra-1"}
"""What a scrape may put over the labels of the VMs."""
CALLS_EVERY_SECONDS = 3.0


@dataclass(frozen=True)
class Watched:
    """A run that is over: its Prometheus, and when it was."""

    session: aiohttp.ClientSession
    url: str
    start: float
    end: float
    vm: tuple[str, str]

    def values(self, job: str, **chosen: str) -> dict[str, str]:
        """The variables of the dashboards for this run; everything where nothing is chosen."""
        span = {"__rate_interval": "15s", "__range": f"{self.end - self.start:.0f}s"}
        return {"job": job, "namespace": ".*", "node": ".+", **span, **chosen}

    def queries(self, job: str) -> list[Query]:
        """Every query: the overview's of everything, the other dashboard's of one VM."""
        namespace, name = self.vm
        return [
            *panels(self.values(job), OVERVIEW),
            *panels(self.values(job, namespace=namespace, name=name), ONE_VM),
        ]

    async def ask(self, query: Query) -> list[dict[str, Any]]:
        """The series of a query over the run."""
        asked = {
            "query": query.expression,
            "start": f"{self.start}",
            "end": f"{self.end}",
            "step": "1",
        }
        async with self.session.post(f"{self.url}/api/v1/query_range", data=asked) as response:
            answer = await response.json()
        assert answer["status"] == "success", (query, answer)
        assert answer["data"]["resultType"] == "matrix", query
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series


@pytest.fixture(scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    """One run for all the tests of this module."""
    directory = tmp_path_factory.mktemp("live")
    stop = asyncio.Event()
    demo = FaultyDemo(lambda: datetime.now(UTC), speed=SPEED)
    shortened = shorten_settings(SPEED)
    config = {
        "stuck": shortened["stuck"],
        "limits": {"vmiSeries": 12},
        "kube": {**shortened["kube"], "refusedRetry": "20s"},
    }
    async with demo, aiohttp.ClientSession() as session:
        kubeconfig = open_kubeconfig(directory / "kubeconfig", demo.url)
        async with program(directory, "--kubeconfig", str(kubeconfig), config=config) as exporter:
            await exporter.ready()
            async with _prometheus(directory, session, exporter.metrics) as url:
                start = time.time()
                failing = next(vm for vm in demo.scenario.vms if vm.name == "failing-1")
                vm = failing.namespace, failing.name
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(demo.run(exporter.query, stop))
                    tasks.create_task(_call(session, exporter, demo, stop))
                    tasks.create_task(_trouble(demo, exporter, vm))
                    await asyncio.sleep(RUN_SECONDS)
                    stop.set()
                yield Watched(session, url, start, time.time(), vm)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [HONORED, RENAMED])
async def test_every_query_of_every_panel_shows_something(
    watched: Watched, job: str, prove: Callable[[str], None]
) -> None:
    """Each has, at some instant of the run, a value that is neither 0 nor NaN."""
    shown = [(query, _first_telling(await watched.ask(query))) for query in watched.queries(job)]
    empty = [query for query, value in shown if value is None]
    prove(f"{len(shown) - len(empty)} of {len(shown)} dashboard queries show something ({job})")
    for query, value in shown if job == HONORED else ():
        prove(f"  {query.dashboard}: {query.panel} [{query.ref}]")
        prove(f"    {query.expression}")
        prove(f"    = {value}")

    assert not empty


@pytest.mark.timeout(600)
async def test_vms_keep_their_labels_whatever_the_scrape_does(watched: Watched) -> None:
    """Without honorLabels no panel takes the exporter's namespace or node for a VM's."""
    wrong, nodes = [], set()
    for query in watched.queries(RENAMED):
        for series in await watched.ask(query):
            labels = series["metric"]
            nodes.add(labels.get("node"))
            if set(labels) >= {"namespace", "name"} and set(SCRAPE_LABELS.items()) & labels.items():
                wrong.append((query.panel, query.ref, labels))

    assert not wrong
    assert nodes >= {"node-1", "node-2", "node-3", "node-4"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [HONORED, RENAMED])
async def test_a_chosen_namespace_and_node_filter(watched: Watched, job: str) -> None:
    """With one namespace and one node chosen, no series of another VM or node is shown."""
    namespace, _ = watched.vm
    namespaces, nodes = set(), set()
    for query in panels(watched.values(job, namespace=namespace, node="node-1"), OVERVIEW):
        for series in await watched.ask(query):
            labels = series["metric"]
            namespaces |= {labels["namespace"]} if "namespace" in labels else set()
            # Of VMs and of refusals the namespace is chosen, of nodes the node.
            nodes |= {labels["node"]} if set(labels) == {"node"} else set()

    assert namespaces == {namespace}
    assert nodes == {"node-1"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [HONORED, RENAMED])
async def test_every_variable_offers_what_is_there(watched: Watched, job: str) -> None:
    """The namespaces, nodes and VMs of the cluster can be chosen."""
    namespace, name = watched.vm
    there = {"namespace": namespace, "node": "node-1", "name": name}
    for query in variables(watched.values(job)):
        label = query.panel.removeprefix("variable ")
        offered = {series["metric"].get(label) for series in await watched.ask(query)}
        assert there[label] in offered
        assert SCRAPE_LABELS["namespace"] not in offered


def _first_telling(matrix: list[dict[str, Any]]) -> str | None:
    """The labels, the instant and the value of the first sample that is neither 0 nor NaN."""
    for series in matrix:
        for instant, text in series["values"]:
            value = float(text)
            if value != 0 and not math.isnan(value):
                labels = ", ".join(f'{name}="{v}"' for name, v in series["metric"].items())
                at = datetime.fromtimestamp(instant, UTC)
                return f"{value:g} {{{labels}}} at {at:%H:%M:%S}"
    return None


async def _trouble(demo: FaultyDemo, exporter: Program, vm: tuple[str, str]) -> None:
    """What happens in no healthy cluster, one after another, each until it is to be seen."""
    _lose_mark(demo, *vm)
    await asyncio.sleep(5)
    demo.server.inject(b'{"type":"ADDED"}\n', "virtualmachineinstances")
    await _seen(exporter, "refused_objects_total", "virtualmachineinstances")
    demo.server.cut("pods")
    await _seen(exporter, "watch_restarts_total", "pods")
    demo.server.answer("kubevirts", 403)
    demo.server.cut("kubevirts")
    await _seen(exporter, "permission_missing", "kubevirts")
    demo.server.recover("kubevirts")


async def _seen(exporter: Program, metric: str, resource: str) -> None:
    """Wait until a metric of the exporter is no longer 0, and has been scraped."""

    async def attempt() -> bool:
        value = await exporter.sample(f"kubevirt_eviction_exporter_{metric}", resource=resource)
        return value > 0

    await poll(attempt, what=metric)
    await asyncio.sleep(3)


def _lose_mark(demo: FaultyDemo, namespace: str, name: str) -> None:
    """Take the annotation off a VM's pod, whose container waits, so that KubeVirt lets it be."""
    pod = demo.cluster.launcher(namespace, name)
    assert pod is not None

    def wait(made: Object) -> None:
        for container in made["status"]["containerStatuses"]:
            container["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}

    def unmark(made: Object) -> None:
        made["metadata"]["annotations"].pop(objects.EVICTION_IN_PROGRESS, None)

    store = demo.cluster.store
    waiting = store.update(PODS, objects.changed(pod, wait), subresource=True)
    store.update(PODS, objects.changed(waiting, unmark))


async def _call(
    session: aiohttp.ClientSession, exporter: Program, demo: FaultyDemo, stop: asyncio.Event
) -> None:
    """A second caller beside the demo's descheduler; it asks about every VM, and wrongly too."""
    candidates: list[Mapping[str, str]] = [
        *({"namespace": vm.namespace, "name": vm.name} for vm in demo.scenario.vms),
        {"namespace": "shop", "name": "nobody"},
        {**dict(zip(("namespace", "name"), demo.example, strict=True)), "vmiUid": "a-pod's"},
    ]
    while not stop.is_set():
        for path in ("/v1/blocked", "/v1/evacuations"):
            async with session.get(exporter.query + path) as response:
                await response.read()
        url = f"{exporter.query}/v1/verdicts"
        async with session.post(url, json={"candidates": candidates}) as response:
            assert response.status == 200
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), CALLS_EVERY_SECONDS)


@asynccontextmanager
async def _prometheus(
    directory: Path, session: aiohttp.ClientSession, target: str
) -> AsyncIterator[str]:
    """A Prometheus that scrapes the target every second."""
    address = f"127.0.0.1:{free_port()}"
    static = {"targets": [target.removeprefix("http://")], "labels": SCRAPE_LABELS}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": HONORED, "honor_labels": True, "static_configs": [static]},
            {"job_name": RENAMED, "honor_labels": False, "static_configs": [static]},
        ],
    }
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    server = Process(
        [
            str(find_binary("prometheus")),
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'prometheus'}",
            f"--web.listen-address={address}",
        ],
        directory / "prometheus.log",
    )
    server.start()

    async def scraped() -> bool:
        if not server.running:
            raise server.failure("ended")
        with suppress(aiohttp.ClientError):
            url = f"http://{address}/api/v1/query?query=count(up==1)==2"
            async with session.get(url) as response:
                return bool((await response.json())["data"]["result"])
        return False

    try:
        await poll(scraped, what="Prometheus scrapes both jobs")
        yield f"http://{address}"
    finally:
        server.kill()
