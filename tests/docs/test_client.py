"""A client built from docs/api.md: no endpoint contradicts another about any VM."""

import asyncio
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

from exporter.engine.facts.model import KubeVirtSettings
from exporter.server.apps import make_query_app
from tests.support.builders import NOW, a_running_state, a_state, a_vmi
from tests.support.documents import API, read
from tests.support.serving import serving
from tests.unit.server.api.test_handlers import ServedApi


EMPTY = {"waits": 0, "leaves": 0, "restarts": 0, "stays": 0, "fails": 0, "external": 0, "ends": 0}


def a_busy_cluster() -> ServedApi:
    """VMs of every strategy on three nodes: migrating, cooling down or evacuating."""
    api = ServedApi()
    api.store.put(KubeVirtSettings())
    strategies = ("LiveMigrate", "LiveMigrateIfPossible", "None", "External")
    states = (None, a_state(), a_running_state())
    kinds = product(strategies, (True, False), states, (None, 60.0, 4000.0))
    for number, (strategy, migratable, state, age) in enumerate(kinds):
        node = f"n{number % 3}"
        vmi = a_vmi(
            name=f"vm{number}",
            uid=f"u{number}",
            node=node,
            eviction_strategy=strategy,
            migratable=migratable,
            migration=state,
            evacuation_node="" if age is None else node,
            eviction_requested_at=None if age is None else NOW - age,
        )
        api.store.put(vmi)
    return api


class Client:
    """Sends the requests of docs/api.md, and compares the answers."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.compared = 0
        self.fields = {
            name: re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
            for name, section in re.findall(
                r"^### (\w+)\n(.*?)(?=^### |\Z)", read(API), re.MULTILINE | re.DOTALL
            )
        }

    def ask(self, path: str, body: object = None) -> Any:
        """The answer to a GET, or to a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data)) as answer:  # noqa: S310 (our own)
            return json.load(answer)

    def compare(self, answer: object, other: object, what: str) -> None:
        """Check that two values are equal."""
        self.compared += 1
        assert answer == other, what

    def compare_all(self) -> None:
        """Compare the answers of all endpoints about every VM, and all sums."""
        evacuations = {row["name"]: row for row in self.ask("/v1/evacuations")["evacuations"]}
        blocked = {(o["name"], o["checkpoint"]): o for o in self.ask("/v1/blocked")["blocked"]}
        drains: Counter[str] = Counter()
        for node in self.ask("/v1/nodes")["nodes"]:
            self.compare([*node], self.fields["NodeAnswer"], "fields of NodeAnswer")
            alone = self.ask(f"/v1/nodes/{node['node']}")
            self.compare(node, {key: alone[key] for key in node}, node["node"])
            outcomes = Counter(candidate["outcome"] for candidate in alone["candidates"])
            self.compare(EMPTY | outcomes, {key: node[key] for key in EMPTY}, node["node"])
            self.compare(node["canBeEmptied"], not node["stays"] + node["fails"], node["node"])
            self.compare(node["dependsOnOthers"], node["external"] > 0, node["node"])
            drains.update(outcomes)
            for candidate in alone["candidates"]:
                self.compare_vm(candidate, evacuations.get(candidate["name"]), blocked)
        status = self.ask("/v1/status")["vmis"]
        self.compare(status["drain"], EMPTY | drains, "drain of the status")
        self.compare(status["known"], drains.total(), "VMs of the status")

    def compare_vm(self, candidate: Any, evacuation: Any, blocked: dict[Any, Any]) -> None:
        """Compare the answers about one VM: node, VM, verdict, evacuation and blocked set."""
        name = candidate["name"]
        vmi = self.ask(f"/v1/vmis/{candidate['namespace']}/{name}")
        asked = {
            "candidates": [{"namespace": candidate["namespace"], "name": name}],
            "dryRun": True,
        }
        (verdict,) = self.ask("/v1/verdicts", asked)["verdicts"]
        self.compare([*verdict], self.fields["VerdictAnswer"], "fields of VerdictAnswer")
        self.compare(vmi["evacuation"], evacuation, name)
        self.compare(verdict["evacuating"], evacuation is not None, name)
        self.compare(verdict["stuck"], bool(evacuation and evacuation["stuck"]), name)
        self.compare(verdict["drain"], candidate["outcome"], name)
        self.compare(vmi["drain"], candidate["outcome"], name)
        reasons = []
        for checkpoint in ("filter", "preEviction"):
            at = vmi["verdicts"][checkpoint]
            entry = blocked.get((name, checkpoint), {"reason": None, "notBefore": None})
            self.compare(
                (at["reason"], at["notBefore"]), (entry["reason"], entry["notBefore"]), name
            )
            self.compare(
                self.ask("/v1/verdicts", asked | {"checkpoint": checkpoint})["verdicts"], [at], name
            )
            reasons.append(at["reason"])
        self.compare(verdict["reason"], reasons[0] or reasons[1], name)


async def test_no_endpoint_contradicts_another(prove: Callable[[str], None]) -> None:
    """All endpoints agree on each VM, and each count is the sum over its VMs."""
    async with serving(make_query_app(a_busy_cluster().service)) as url:
        client = Client(url)
        await asyncio.to_thread(client.compare_all)
    prove(f"client of docs/api.md: {client.compared} comparisons, all equal")
