"""The dashboards' queries in a real Prometheus that scrapes the real program.

Prometheus scrapes the program in three jobs: with honorLabels, without, and as two clusters with a
label `cluster`. It evaluates the shipped rules with shorter durations, and scrapes a page with the
metrics of other programs.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from dashboards.build import ONE_VM, OVERVIEW, TRENDS
from exporter.demo import objects, shorten_settings
from exporter.demo.objects import Object
from exporter.demo.store import PODS
from tests.cluster import find_binary, poll
from tests.cluster.perses import serve_perses
from tests.cluster.ports import free_port
from tests.cluster.processes import Process
from tests.cluster.users import open_kubeconfig
from tests.generate.rules import load_groups
from tests.integration.alerts.scaling import scale
from tests.support.browser import NoChromium, chromium
from tests.support.certificates import write_certificate
from tests.support.dashboards import (
    Query,
    fill,
    list_titles,
    load_dashboards,
    panels,
    perses_dashboards,
    perses_panels,
    variables,
)
from tests.support.faulty_apiserver import FaultyDemo
from tests.support.grafana import (
    VERSION,
    NoNode,
    Panel,
    Shown,
    build_page,
    check_types,
    open_page,
    read_panels,
)
from tests.support.other_programs import OtherPrograms
from tests.support.program import ANYWHERE, Program, program
from tests.support.reviews import a_review
from tests.support.serving import serving


RUN_SECONDS = 130
"""The seconds of a run; `diverged` is true only 120 s after a pod has lost its annotation."""
SPEED = 3.0
HONORED, RENAMED, FLEET = "exporter", "exporter-renamed", "fleet"
EAST, WEST = "east", "west"
CLUSTERS = {HONORED: "", RENAMED: "", FLEET: EAST}
"""The cluster that is chosen in the dashboard, by job."""
RULES_FASTER = 12.0
SCRAPE_LABELS = {"namespace": "monitoring", "node": "infra-1"}
"""Labels of the scrape, which may replace those of the VMs."""
CALLS_EVERY_SECONDS = 3.0
WIDTH = 1280
"""The width of the window in which Grafana's libraries draw."""


@dataclass(frozen=True)
class Watched:
    """A finished run: its Prometheus, its start and its end."""

    session: aiohttp.ClientSession
    url: str
    start: float
    end: float
    vm: tuple[str, str]

    def values(self, job: str, **chosen: str) -> dict[str, str]:
        """The values of the dashboards' variables for this run."""
        span = {"__rate_interval": "15s", "__range": f"{self.end - self.start:.0f}s"}
        cluster = CLUSTERS[job]
        return {"cluster": cluster, "job": job, "namespace": ".*", "node": ".+", **span, **chosen}

    def queries(self, job: str) -> list[Query]:
        """Every query of the dashboards."""
        namespace, name = self.vm
        return [
            *panels(self.values(job), OVERVIEW),
            *panels(self.values(job), TRENDS),
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
    async with watching(tmp_path_factory.mktemp("live")) as run:
        yield run


@asynccontextmanager
async def watching(
    directory: Path, jobs: Collection[str] = (HONORED, RENAMED, FLEET)
) -> AsyncIterator[Watched]:
    """Run the cluster for two minutes, scraped in these jobs; yields the finished run."""
    stop = asyncio.Event()
    demo = FaultyDemo(lambda: datetime.now(UTC), speed=SPEED)
    write_certificate(directory, "admission")
    shortened = shorten_settings(SPEED)
    config = {
        "stuck": shortened["stuck"],
        "kube": shortened["kube"],
        "listen": {**ANYWHERE["listen"], "admission": "127.0.0.1:0"},
        "tls": {
            "admission": {
                "certFile": str(directory / "admission.crt"),
                "keyFile": str(directory / "admission.key"),
            }
        },
    }
    async with demo, aiohttp.ClientSession() as session:
        kubeconfig = open_kubeconfig(directory / "kubeconfig", demo.url)
        async with program(directory, "--kubeconfig", str(kubeconfig), config=config) as exporter:
            await exporter.ready()
            others = OtherPrograms(demo.cluster.nodes)
            application = web.Application()
            application.router.add_get("/metrics", others.answer)
            async with (
                serving(application) as page,
                _prometheus(directory, session, exporter.metrics, page, jobs) as url,
            ):
                start = time.time()
                failing = next(vm for vm in demo.scenario.vms if vm.name == "failing-1")
                vm = failing.namespace, failing.name
                # Its drain is stuck, because the VM cannot leave its node.
                vmi = demo.cluster.vmi(*vm)
                assert vmi is not None
                demo.cluster.cordon(vmi["status"]["nodeName"])
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(demo.run(exporter.query, stop))
                    tasks.create_task(_call(session, exporter, demo, stop))
                    _lose_mark(demo, *vm)
                    await asyncio.sleep(RUN_SECONDS)
                    stop.set()
                yield Watched(session, url, start, time.time(), vm)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", [HONORED, RENAMED, FLEET])
async def test_every_query_of_every_panel_shows_something(
    watched: Watched, job: str, prove: Callable[[str], None]
) -> None:
    """In the run each query has at least one value other than 0 and NaN."""
    shown = [(query, _find_first_value(await watched.ask(query))) for query in watched.queries(job)]
    empty = [query for query, value in shown if value is None]
    several = "one of two clusters" if CLUSTERS[job] else "one cluster"
    prove(
        f"{len(shown) - len(empty)} of {len(shown)} dashboard queries show something"
        f" ({job}, {several})"
    )
    for query, value in shown if job == HONORED else ():
        prove(f"  {query.dashboard}: {query.panel} [{query.ref}]")
        prove(f"    {query.expression}")
        prove(f"    = {value}")

    assert not empty


@pytest.mark.timeout(900)
async def test_the_libraries_of_grafana_draw_every_panel(
    watched: Watched, prove: Callable[[str], None]
) -> None:
    """In Chromium each panel of each dashboard has data, no error, and no title that is cut."""
    _build_grafana()
    namespace, name = watched.vm
    chosen: dict[str, dict[str, str | Sequence[str]]] = {
        OVERVIEW: {"job": HONORED},
        TRENDS: {"job": HONORED, "node": ["node-1"]},
        ONE_VM: {"job": HONORED, "namespace": namespace, "name": name},
    }
    drawn: dict[str, list[Panel]] = {}
    try:
        async with chromium() as browser:
            for uid, values in chosen.items():
                board = _shorten_steps(load_dashboards()[uid])
                shown = Shown(board, watched.start, watched.end, values, scrape_interval=1)
                page = await open_page(browser, watched.url, shown, "light", WIDTH)
                drawn[uid] = await read_panels(page)
                await page.close()
    except NoChromium as none:
        pytest.skip(str(none))
    for uid, panels_drawn in drawn.items():
        prove(f"Grafana's libraries {VERSION} draw {uid}: {len(panels_drawn)} panels")
    titles = {uid: [panel.title for panel in found] for uid, found in drawn.items()}
    faults = [
        (panel.title, fault)
        for found in drawn.values()
        for panel in found
        for fault in panel.faults
    ]

    assert titles == {
        uid: [fill(title, {"node": "node-1"}) for title in list_titles(load_dashboards()[uid])]
        for uid in chosen
    }
    assert not faults
    assert [
        panel.title for found in drawn.values() for panel in found if "No data" in panel.text
    ] == []


def test_grafana_has_types_for_all_that_the_dashboards_say(prove: Callable[[str], None]) -> None:
    """Each field of the dashboards has a type in @grafana/schema, and a value of this type."""
    _build_grafana()
    prove(f"compiled with @grafana/schema {VERSION}")

    assert check_types() == ""


@pytest.mark.timeout(600)
async def test_a_perses_server_shows_every_query(
    watched: Watched, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """A Perses server stores our dashboards unchanged, and shows a value for each query."""
    namespace, name = watched.vm
    values = {
        OVERVIEW: watched.values(HONORED),
        TRENDS: watched.values(HONORED),
        ONE_VM: watched.values(HONORED, namespace=namespace, name=name),
    }
    committed = perses_dashboards()
    async with serve_perses(tmp_path) as url:
        perses = Perses(watched.session, url)
        proxied = replace(watched, url=await perses.add_prometheus(watched.url))
        stored = {uid: await perses.store(uid, config) for uid, config in committed.items()}
        shown = {
            query: _find_first_value(await proxied.ask(query))
            for uid, config in stored.items()
            for query in perses_panels(values[uid], uid, config)
        }
    for uid, config in stored.items():
        queries = [query for query in shown if query.dashboard == uid]
        prove(f"Perses stored {uid}: {len(config['panels'])} panels, {len(queries)} queries")
        for query in queries:
            prove(f"  {query.panel} [{query.ref}] = {shown[query]}")

    assert stored == committed
    assert [query for query, value in shown.items() if value is None] == []


@pytest.mark.timeout(600)
async def test_nothing_of_another_cluster_is_shown(watched: Watched) -> None:
    """If one of two clusters is chosen, every series is of this cluster."""
    clusters = set()
    for query in watched.queries(FLEET):
        for series in await watched.ask(query):
            clusters.add(series["metric"].get("cluster"))

    assert clusters == {EAST}


@pytest.mark.timeout(600)
async def test_load_degrades_to_nothing(watched: Watched) -> None:
    """Without node_exporter the panel about load is empty, and the one about moves is not."""
    values = watched.values(FLEET) | {"cluster": WEST}
    shown = {
        (query.panel, query.ref): bool(await watched.ask(query))
        for query in panels(values, TRENDS)
        if "$node" in query.panel
    }

    load, moves = "Load of $node", "Moves of the VMs of $node"
    assert shown == {
        **{(load, ref): False for ref in "ABC"},
        **{(moves, ref): True for ref in "AB"},
    }


@pytest.mark.timeout(600)
async def test_vms_keep_their_labels_whatever_the_scrape_does(watched: Watched) -> None:
    """Without honorLabels the panels still show the VM's namespace and node."""
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
    """If a namespace and a node are chosen, every series belongs to them."""
    namespace, _ = watched.vm
    namespaces, nodes = set(), set()
    chosen = watched.values(job, namespace=namespace, node="node-1")
    for query in (*panels(chosen, OVERVIEW), *panels(chosen, TRENDS)):
        for series in await watched.ask(query):
            labels = series["metric"]
            namespaces |= {labels["namespace"]} if "namespace" in labels else set()
            # The namespace filters series of VMs and of refusals; the node filters series of nodes.
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


def _build_grafana() -> None:
    try:
        build_page()
    except NoNode as none:
        pytest.skip(str(none))


def _shorten_steps(board: Mapping[str, Any]) -> dict[str, Any]:
    """The dashboard for a run with short intervals between scrapes and between rules."""
    text = json.dumps(board).replace("60 * sum_over_time", f"{60 / RULES_FASTER:g} * sum_over_time")
    faster: dict[str, Any] = json.loads(text)
    for panel in faster["panels"]:
        panel.pop("interval", None)
    return faster


@dataclass(frozen=True)
class Perses:
    """The API of a Perses server."""

    session: aiohttp.ClientSession
    url: str

    async def add_prometheus(self, url: str) -> str:
        """Add the default data source; returns its URL behind Perses's proxy."""
        proxy = {"kind": "HTTPProxy", "spec": {"url": url}}
        plugin = {"kind": "PrometheusDatasource", "spec": {"proxy": proxy}}
        spec = {"default": True, "plugin": plugin}
        await self._create("globaldatasources", "GlobalDatasource", {"name": "prometheus"}, spec)
        return f"{self.url}/proxy/globaldatasources/prometheus"

    async def store(self, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Create a dashboard in its own project; returns what the server stores."""
        await self._create("projects", "Project", {"name": name}, {})
        path = f"projects/{name}/dashboards"
        await self._create(path, "Dashboard", {"name": name, "project": name}, config)
        async with self.session.get(f"{self.url}/api/v1/{path}/{name}") as response:
            stored: dict[str, Any] = (await response.json())["spec"]
        for variable in stored["variables"]:
            # The server adds this default.
            assert variable["spec"]["display"].pop("hidden") is False
        return stored

    async def _create(
        self, path: str, kind: str, metadata: Mapping[str, str], spec: Mapping[str, Any]
    ) -> None:
        made = {"kind": kind, "metadata": metadata, "spec": spec}
        async with self.session.post(f"{self.url}/api/v1/{path}", json=made) as response:
            assert response.ok, (path, await response.text())


def _find_first_value(matrix: list[dict[str, Any]]) -> str | None:
    """The labels, the instant and the value of the first sample that is neither 0 nor NaN."""
    for series in matrix:
        for instant, text in series["values"]:
            value = float(text)
            if value != 0 and not math.isnan(value):
                labels = ", ".join(f'{name}="{v}"' for name, v in series["metric"].items())
                at = datetime.fromtimestamp(instant, UTC)
                return f"{value:g} {{{labels}}} at {at:%H:%M:%S}"
    return None


def _lose_mark(demo: FaultyDemo, namespace: str, name: str) -> None:
    """Remove a pod's annotation; KubeVirt does not restore it on a pod that is not ready."""
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
    """Ask about every VM, and send invalid requests."""
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
        async with session.post(url, json=[]) as response:
            assert response.status == 422
        review = exporter.admission + "/v1/evictions"
        async with session.post(review, json=a_review(), ssl=False) as response:
            assert response.status == 200
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), CALLS_EVERY_SECONDS)


@asynccontextmanager
async def _prometheus(
    directory: Path,
    session: aiohttp.ClientSession,
    target: str,
    others: str,
    jobs: Collection[str],
) -> AsyncIterator[str]:
    """A Prometheus that scrapes the target in these jobs, and other programs, every second.

    Of the clusters `EAST` and `WEST`, only `EAST` has the other programs.
    """
    address = f"127.0.0.1:{free_port()}"
    rules = directory / "rules.yaml"
    rules.write_text(yaml.safe_dump(scale(load_groups(), RULES_FASTER), sort_keys=False))

    def scrape(job: str, url: str, *clusters: str, honor: bool = True) -> dict[str, Any]:
        statics = [
            {"targets": [url.removeprefix("http://")], "labels": {**SCRAPE_LABELS, **named}}
            for named in ({"cluster": cluster} if cluster else {} for cluster in clusters)
        ]
        return {"job_name": job, "honor_labels": honor, "static_configs": statics}

    every = {
        HONORED: scrape(HONORED, target, ""),
        RENAMED: scrape(RENAMED, target, "", honor=False),
        FLEET: scrape(FLEET, target, EAST, WEST),
    }
    other_clusters = ("", EAST) if FLEET in jobs else ("",)
    scrapes = [*(every[job] for job in jobs), scrape("others", others, *other_clusters)]
    config = {
        "global": {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "evaluation_interval": "2s",
        },
        "rule_files": [str(rules)],
        "scrape_configs": scrapes,
    }
    targets = sum(len(scrape["static_configs"]) for scrape in scrapes)
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
            url = f"http://{address}/api/v1/query?query=count(up==1)=={targets}"
            async with session.get(url) as response:
                return bool((await response.json())["data"]["result"])
        return False

    try:
        await poll(scraped, what="Prometheus scrapes all")
        yield f"http://{address}"
    finally:
        server.kill()
