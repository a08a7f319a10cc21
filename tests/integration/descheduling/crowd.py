"""Many VMs as API objects without a controller, and one descheduler cycle over them."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from exporter.demo import objects
from exporter.demo.objects import Object
from tests.cluster import NAMESPACES, PODS, VMIS, Client, launcher_pod, namespace, vmi
from tests.cluster.resources import NODES
from tests.integration.descheduling.descheduler import Descheduler, Verdicts, build_policy
from tests.integration.descheduling.stage import FULL
from tests.support.program import Program


SPACE = "crowd"
BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
QUESTIONS = "descheduler_kubevirt_verdicts_total"
POLLS = "descheduler_kubevirt_snapshot_polls_total"
DURATION = "kubevirt_eviction_exporter_request_duration_seconds"
ENDPOINTS = ("verdicts", "blocked", "blocked_wait")
_FULL, _EMPTY = 8, 2
_AT_ONCE = 40


async def fill(admin: Client, count: int, *, migrating: int) -> None:
    """Create this many VMs with launcher pods on full nodes, and some empty nodes.

    The first `migrating` VMs migrate now, and all others have just migrated.
    """
    await admin.create(NAMESPACES, namespace(SPACE))
    room = {"cpu": "1k", "memory": f"{count // _FULL + 10}Gi", "pods": str(count)}
    for number in range(_FULL + _EMPTY):
        await admin.create(NODES, _node(f"n{number}", room))
        await admin.merge(NODES, None, f"n{number}", {"spec": {"taints": None}})
    turn = asyncio.Semaphore(_AT_ONCE)

    async def add(number: int) -> None:
        async with turn:
            body = _vmi(number, is_migrating=number < migrating)
            made = await admin.create(VMIS, body)
            await admin.create(PODS, _pod(made))

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(add(number))


@dataclass(frozen=True)
class Cycle:
    """One cycle: its duration, the requests to the sidecar, and the results."""

    seconds: float
    requests: float
    lists: float
    long_polls: float
    blocks: float
    evicted: int
    questions: dict[tuple[str, str], int]
    """The plugin's own count, by checkpoint and outcome."""
    polls: dict[str, int]
    """The plugin's own count of answered lists and long polls, by result."""

    def count(self, checkpoint: str, outcome: str = "") -> int:
        """How often the plugin was called at a checkpoint, in all or with one outcome."""
        return sum(
            times
            for (at, ended), times in self.questions.items()
            if at == checkpoint and outcome in {"", ended}
        )


async def run_cycle(
    folder: Path, login: Path, verdicts: Verdicts | None, exporter: Program
) -> Cycle:
    """Run exactly one cycle over all pods."""

    async def asked(endpoint: str) -> float:
        return await exporter.sample(f"{DURATION}_count", endpoint=endpoint)

    before = {name: await asked(name) for name in ENDPOINTS}
    blocks = await exporter.sample(BLOCKS)
    policy = build_policy(verdicts, bounds=FULL)
    async with Descheduler(folder, login, policy, interval=600) as process:
        await process.ran_in_all(1)
        questions = await process.samples(QUESTIONS, "checkpoint", "outcome")
        polls = await process.samples(POLLS, "result")
    after = {name: await asked(name) - times for name, times in before.items()}
    return Cycle(
        seconds=process.durations()[0],
        requests=after["verdicts"],
        lists=after["blocked"],
        long_polls=after["blocked_wait"],
        blocks=await exporter.sample(BLOCKS) - blocks,
        evicted=len(process.logged("Evicted pods")),
        questions={(at, ended): int(times) for (at, ended), times in questions.items()},
        polls={result: int(times) for (result,), times in polls.items() if times},
    )


def _node(name: str, room: dict[str, str]) -> Object:
    return objects.build_node(name) | {"status": {"capacity": room, "allocatable": room}}


def _vmi(number: int, *, is_migrating: bool) -> Object:
    now = datetime.now(UTC)
    state: Object = {"migrationUid": f"m-{number}", "startTimestamp": objects.format_time(now)}
    if not is_migrating:
        state["startTimestamp"] = objects.format_time(now - timedelta(seconds=30))
        state |= {"endTimestamp": objects.format_time(now), "completed": True}
    status = {"migrationState": state}
    return vmi(f"vm-{number:04}", SPACE, node=f"n{number % _FULL}", status=status)


def _pod(vmi: Object) -> Object:
    requests = {"cpu": "100m", "memory": "1Gi"}
    container = {"name": "compute", "image": "virt-launcher", "resources": {"requests": requests}}
    made = launcher_pod(vmi, spec={"containers": [container]})
    # Nothing here reads the status, and writing it would cost a request.
    del made["status"]
    return made
