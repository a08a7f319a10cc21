"""Forty VMs under the real descheduler: without blocks, with the plugin, or with the webhook."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from exporter.engine.facts.policy import Reason
from tests.cluster import ApiError, RealCluster, poll
from tests.cluster.audit import Creation
from tests.cluster.resources import PODS
from tests.integration.descheduling.descheduler import (
    USER,
    Descheduler,
    Limits,
    Verdicts,
    build_policy,
)
from tests.integration.descheduling.ledger import Eviction, Ledger, Rules, recording, write_ledger
from tests.integration.descheduling.world import World, spread
from tests.support.admission import admitting, configuration, make_pair, registered
from tests.support.program import Program, program


STOCK = "stock-descheduler"
OURS = "kubevirt-eviction-exporter: VMI "
REVIEWS = "kubevirt_eviction_exporter_admission_reviews_total"
FAILED_OPEN = "apiserver_admission_webhook_fail_open_count"
LAYOUT = spread({"node-1": 12, "node-2": 8, "node-3": 8, "node-4": 8, "node-5": 4})
VMS = [name for names in LAYOUT.values() for name in names]
BATCH = LAYOUT["node-1"][:8]
MOVABLE = LAYOUT["node-1"][:10]
EVERY = 3.0
CHURN = 3
"""The number of evictions inside a cooldown that counts as churn."""
CHURNING = ("nothing", "warn")
"""The columns in which no eviction is prevented."""
BLOCKS_SEEN = 5
LIMITS = Limits(per_node=12, in_all=24)
"""These limits are higher than the shipped ones. During a migration the descheduler may also evict
the target pod, and then counts that eviction as in progress. Two such evictions use up the shipped
limit of a node.
"""
WITHIN = 1200.0
COOLDOWN = {
    "migrationCooldown": "15s",
    "maxMigrationCooldown": "60s",
    "migrationHistoryWindow": "24h",
}
RULES = Rules(base=timedelta(seconds=15), cap=timedelta(seconds=60))
BLOCKED = "Eviction blocked"
BLOCKS = "descheduler_kubevirt_eviction_blocks_total"


@dataclass(frozen=True)
class Run:
    """The effect of some cycles on forty VMs, and the exporter's counts."""

    name: str
    ledger: Ledger
    cycles: int
    seconds: float
    log: list[dict[str, Any]]
    warned: float
    """How many evictions got the webhook's warning."""
    denied: float
    """How many evictions the webhook denied."""
    counted: dict[str, float]
    """The exporter's `descheduler_kubevirt_eviction_blocks_total` by reason."""
    failed_open: float
    """How often the webhook did not answer the API server within the timeout."""
    noticed: list[tuple[str, datetime]]
    """The VMs whose migrations ended, and when the exporter read each end."""

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The descheduler's log lines about blocks of the plugin."""
        return [line for line in self.log if line["msg"] == BLOCKED]

    @property
    def denials(self) -> list[str]:
        """The exporter's denials in the audit log."""
        return [denial.message for denial in find_denials(self.ledger)]


@dataclass
class WebhookCluster:
    """A cluster on which exporters can run, for the plugin or with a registered webhook."""

    world: World
    folder: Path
    login: Path

    @property
    def control(self) -> RealCluster:
        """The control plane."""
        return self.world.control

    @asynccontextmanager
    async def exporter(
        self, mode: str, *users: str, policy: Mapping[str, object] = COOLDOWN
    ) -> AsyncIterator[Program]:
        """Run a ready exporter whose webhook the API server calls for these users."""
        pair = make_pair(self.folder / "pair")
        config = admitting(pair, mode, *users) | {"policy": policy}
        login = ("--kubeconfig", str(self.control.kubeconfig(self.control.exporter)))
        async with program(self.folder, *login, config=config) as exporter:
            await exporter.ready()
            webhook = configuration(exporter.admission, pair.authority, users)
            async with registered(self.control, webhook):
                await self._until_called(exporter, users[0])
                yield exporter

    async def failed_open(self) -> float:
        """How often the API server allowed an eviction because the webhook did not answer."""
        text = (await self.control.admin.send("GET", "/metrics")).decode()
        lines = [line for line in text.splitlines() if line.startswith(FAILED_OPEN)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    @asynccontextmanager
    async def asked(self, policy: Mapping[str, object] = COOLDOWN) -> AsyncIterator[Program]:
        """Run a ready exporter that the plugin can ask."""
        login = ("--kubeconfig", str(self.control.kubeconfig(self.control.exporter)))
        async with program(self.folder, *login, config={"policy": policy}) as exporter:
            await exporter.ready()
            yield exporter

    async def _until_called(self, exporter: Program, user: str) -> None:
        """Evict a pod that does not exist, until the API server calls the webhook for this."""
        path = f"{PODS.path('default', 'virt-launcher-nobody')}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "x"}}
        body["metadata"] = {"name": "virt-launcher-nobody", "namespace": "default"}
        async with self.control.client(self.control.certified(user)) as client:

            async def is_called() -> bool:
                try:
                    await client.request("POST", path, json=body)
                except ApiError as error:
                    if error.code != 404:
                        raise
                return await exporter.sample(REVIEWS, outcome="unknown_pod") > 0

            await poll(is_called, what="the webhook called")


async def run_column(hooked: WebhookCluster, column: str, cycles: int) -> Run:
    """Run forty new VMs under a descheduler, for at least this many cycles.

    `column` says what judges evictions: "nothing", "plugin", or the webhook in mode "warn" or
    "enforce". If no moves are prevented, the run ends when VMs have churned. Otherwise it ends when
    evictions were blocked and a VM was evicted again after its cooldown.
    """
    world, namespace = hooked.world, f"column-{column}"
    audit = world.control.api.audit
    pinned = set(VMS) - set(MOVABLE)
    async with AsyncExitStack() as stack:
        failed_open = await hooked.failed_open()
        exporter: Program | None = None
        if column in ("warn", "enforce"):
            exporter = await stack.enter_async_context(hooked.exporter(column, USER))
        elif column == "plugin":
            exporter = await stack.enter_async_context(hooked.asked())
        verdicts = Verdicts(exporter.query) if exporter and column == "plugin" else None
        binary = "descheduler" if verdicts else STOCK
        migrations = await stack.enter_async_context(recording(world.control.admin))
        await stack.enter_async_context(world.vms(namespace, LAYOUT, batch=BATCH, pinned=pinned))
        process = Descheduler(
            hooked.folder / namespace,
            hooked.login,
            build_policy(verdicts, limits=LIMITS),
            interval=EVERY,
            binary=binary,
        )

        async def has_enough() -> bool:
            ledger = write_ledger(namespace, audit, migrations.values())
            if process.cycles < cycles:
                return False
            if column in CHURNING:
                return len(ledger.too_early(RULES)) >= CHURN
            cooling = [line for line in process.logged(BLOCKED) if line["reason"] == "cooldown"]
            blocks = len(find_denials(ledger)) + len(cooling)
            return blocks >= BLOCKS_SEEN and any(ledger.evictions_of(vm) >= 2 for vm in MOVABLE)

        await process.run_until(has_enough, within=WITHIN, what=f"enough of {namespace}")
        await world.at_rest(namespace)
        log = process.logged()
        ledger = write_ledger(namespace, audit, migrations.values())
        warned, denied = [
            0.0 if exporter is None else await exporter.sample(REVIEWS, outcome=outcome)
            for outcome in ("warned", "denied")
        ]
        counted = {
            reason.value: 0.0 if exporter is None else await exporter.sample(BLOCKS, reason=reason)
            for reason in Reason
        }
        failed_open = await hooked.failed_open() - failed_open
        noticed = [] if exporter is None else read_ends(exporter, namespace)
    seconds = (log[-1]["ts"] - log[0]["ts"]) / 1000
    return Run(
        name=column,
        ledger=ledger,
        cycles=process.cycles,
        seconds=seconds,
        log=log,
        warned=warned,
        denied=denied,
        counted=counted,
        failed_open=failed_open,
        noticed=noticed,
    )


def find_denials(ledger: Ledger) -> list[Creation]:
    """The evictions that the webhook has denied."""
    return [eviction for eviction in ledger.refused if OURS in eviction.message]


def read_ends(exporter: Program, namespace: str) -> list[tuple[str, datetime]]:
    """The VMs whose migrations ended, and when the exporter's log says that it read each end."""
    return [
        (event["kubevirt.vm.name"], datetime.fromisoformat(event["timestamp"]))
        for event in exporter.events("migration_ended")
        if event["k8s.namespace.name"] == namespace
    ]


def is_news(eviction: Eviction, run: Run) -> bool:
    """Whether the exporter read the last migration's end just before the eviction, or later.

    "Just before" means one second for the plugin, and five for the webhook. The webhook allows the
    eviction of a VM with an `evacuationNodeName`, and on a busy machine KubeVirt may clear this
    field seconds after the end.
    """
    just_before = timedelta(seconds=1 if run.name == "plugin" else 5)
    ends = [move.end for move in run.ledger.moves_of(eviction.vm) if move.end <= eviction.at]
    read = [at for vm, at in run.noticed if vm == eviction.vm and at >= ends[-1]]
    return eviction.at - min(read, default=ends[-1]) < just_before
