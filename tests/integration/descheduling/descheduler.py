"""The real descheduler as a process with its own user and roles."""

import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import RealCluster, find_binary, poll
from tests.cluster.access import binding
from tests.cluster.objects import Object
from tests.cluster.ports import free_port
from tests.cluster.processes import Process
from tests.cluster.resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES
from tests.cluster.servers import PROBE, Server


_DEPLOY = Path(__file__).parents[3] / "deploy"
POLICY = _DEPLOY / "descheduler/policy.yaml"
RBAC = _DEPLOY / "components/descheduler/rbac.yaml"
USER = "descheduler"
PLUGIN = "KubeVirtVerdicts"
_RUNS_WITHIN = 90.0
CYCLE_BEGAN = "Resetting pod evictor counters"
CYCLE_ENDED = "Number of evictions/requests"
EVICTED = "Eviction in background assumed"
STALLED_AFTER = 20
"""A descheduler has stalled if it evicts nothing in this many cycles and counts evictions as under
way.
"""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The arguments of our plugin."""

    url: str
    ignorable: bool = True
    timeout: str = "1s"


class Descheduler(Server):
    """A descheduler that runs its cycles on a cluster, and its log."""

    def __init__(
        self,
        directory: Path,
        kubeconfig: Path,
        policy: Object,
        *,
        interval: float,
        binary: str = "descheduler",
        gate: bool = True,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "policy.yaml"
        file.write_text(yaml.safe_dump(policy))
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        arguments = [
            str(find_binary(binary)),
            f"--policy-config-file={file}",
            f"--kubeconfig={kubeconfig}",
            f"--descheduling-interval={interval:g}s",
            f"--feature-gates=EvictionsInBackground={str(gate).lower()}",
            "--client-connection-qps=200",
            "--client-connection-burst=400",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={directory / 'certificates'}",
            "--logging-format=json",
            "--v=3",
        ]
        super().__init__(Process(arguments, directory / "descheduler.log"))

    async def ready(self) -> bool:
        """Whether the descheduler listens; it starts to listen before its first cycle."""
        async with (
            aiohttp.ClientSession(timeout=PROBE) as session,
            session.get(f"{self.url}/healthz", ssl=False) as response,
        ):
            return response.status == 200

    def logged(self, message: str = "") -> list[dict[str, Any]]:
        """The log lines whose message begins with this text, oldest first."""
        return [line for line in self._lines() if line["msg"].startswith(message)]

    @property
    def cycles(self) -> int:
        """How many cycles have ended."""
        return len(self.logged(CYCLE_ENDED))

    @property
    def under_way(self) -> int:
        """How many evictions the descheduler counted as under way after its last cycle."""
        return int(self.logged(CYCLE_ENDED)[-1]["evictionRequests"])

    async def ran(self, cycles: int) -> None:
        """Wait until this many more cycles have ended, including the running one."""
        await self.ran_in_all(self.cycles + cycles)

    async def ran_in_all(self, cycles: int) -> None:
        """Wait until this many cycles have ended since the start."""

        async def done() -> bool:
            return self.cycles >= cycles

        try:
            await poll(done, within=_RUNS_WITHIN, what=f"{cycles} cycles")
        except TimeoutError:
            print(self.tail())
            raise

    async def run_until(
        self, enough: Callable[[], Awaitable[bool]], *, within: float, what: str
    ) -> None:
        """Run the descheduler until `enough`, and for one more cycle; restart it if it stalls.

        If a descheduler evicts the target pod of a migration, it counts that eviction as in
        progress even after the migration has ended. It never evicts that pod again. Several such
        pods on a node prevent every other eviction on that node.
        """
        ends_at = time.monotonic() + within
        before = 0

        async def ends() -> bool:
            return await enough() or self._has_stalled(self.cycles - before)

        while True:
            async with self:
                before = self.cycles
                await poll(ends, within=ends_at - time.monotonic(), what=what)
                await self.ran(1)
            if await enough():
                return

    def _has_stalled(self, cycles: int) -> bool:
        """Whether the descheduler has stalled, if `cycles` have ended since its last start."""
        if cycles < STALLED_AFTER or not self.under_way:
            return False
        messages = [line["msg"] for line in self._lines() if line["msg"] in (CYCLE_ENDED, EVICTED)]
        return EVICTED not in messages[-STALLED_AFTER:]

    def durations(self) -> list[float]:
        """The duration of each ended cycle, in seconds."""
        begun = 0.0
        taken = []
        for line in self._lines():
            if line["msg"] == CYCLE_BEGAN:
                begun = line["ts"]
            elif line["msg"] == CYCLE_ENDED:
                taken.append((line["ts"] - begun) / 1000)
        return taken

    async def sample(self, metric: str, /, **labels: str) -> float:
        """The sum of a metric's series with these labels; 0 if there is none."""
        names = tuple(labels)
        wanted = tuple(labels.values())
        return sum(v for k, v in (await self.samples(metric, *names)).items() if k == wanted)

    async def samples(self, metric: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The sums of a metric, by the values of these labels."""
        async with (
            aiohttp.ClientSession(timeout=PROBE) as session,
            session.get(f"{self.url}/metrics", ssl=False) as response,
        ):
            families = text_string_to_metric_families(await response.text())
        # The parser gives the deprecated descheduler_pods_evicted the name of its successor.
        series = {
            tuple(sorted(sample.labels.items())): sample
            for family in families
            for sample in family.samples
            if sample.name == metric
        }
        totals: dict[tuple[str, ...], float] = defaultdict(float)
        for sample in series.values():
            totals[tuple(sample.labels[label] for label in labels)] += sample.value
        return totals

    def _lines(self) -> Iterator[dict[str, Any]]:
        for line in self.log.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                yield json.loads(line)


async def log_in(cluster: RealCluster) -> Path:
    """The kubeconfig of a user who may do what the shipped role allows a descheduler."""
    shipped = yaml.safe_load_all(RBAC.read_text())
    (role,) = [document for document in shipped if document["kind"] == CLUSTER_ROLES.kind]
    await cluster.admin.create(CLUSTER_ROLES, role)
    name = role["metadata"]["name"]
    await cluster.admin.create(CLUSTER_ROLE_BINDINGS, binding(name, USER))
    return cluster.kubeconfig(cluster.certified(USER))


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on simultaneous evictions."""

    per_node: int = 2
    in_all: int = 5


@dataclass(frozen=True, slots=True)
class Bounds:
    """The thresholds of LowNodeUtilization, in percent of memory."""

    room: int
    too_much: int
    of_mean: bool = False
    """Whether the thresholds are distances from the mean of all nodes."""


SHIPPED = Limits()
AROUND_MEAN = Bounds(10, 10, of_mean=True)


def build_policy(
    verdicts: Verdicts | None, *, bounds: Bounds = AROUND_MEAN, limits: Limits = SHIPPED
) -> Object:
    """The shipped policy for requested memory; without verdicts it does not have our plugin.

    Limits and thresholds replace the shipped ones.
    """
    policy: Object = yaml.safe_load(POLICY.read_text())
    policy["maxNoOfPodsToEvictPerNode"] = limits.per_node
    policy["maxNoOfPodsToEvictTotal"] = limits.in_all
    (profile,) = policy["profiles"]
    configured = {plugin["name"]: plugin["args"] for plugin in profile["pluginConfig"]}
    configured["LowNodeUtilization"] |= {
        "useDeviationThresholds": bounds.of_mean,
        "thresholds": {"memory": bounds.room},
        "targetThresholds": {"memory": bounds.too_much},
        "evictionLimits": {"node": limits.per_node},
    }
    if verdicts is None:
        _remove_plugin(profile, PLUGIN)
    else:
        configured[PLUGIN] |= {
            "urlPrefix": verdicts.url,
            "httpTimeout": verdicts.timeout,
            "ignorable": verdicts.ignorable,
        }
    return policy


def _remove_plugin(profile: Object, plugin: str) -> None:
    kept = [entry for entry in profile["pluginConfig"] if entry["name"] != plugin]
    profile["pluginConfig"] = kept
    for point in profile["plugins"].values():
        point["enabled"] = [name for name in point["enabled"] if name != plugin]
