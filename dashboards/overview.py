"""The overview of a cluster. Current problems come first, long time ranges last."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards import moves
from dashboards.looks import (
    GREEN,
    RED,
    YELLOW,
    YES_IS_BAD,
    Column,
    bars_panel,
    stat_panel,
    table_panel,
    time_panel,
)
from dashboards.queries import (
    STUCK,
    VM,
    VMIS,
    each,
    each_vm,
    rename,
    select,
    select_by,
    select_other,
)


Section = Sequence[Builder[Panel]]

SLOTS = 5
"""`maxNoOfPodsToEvictTotal` in the policy of the descheduler operator for KubeVirt."""
RULES = Path(__file__).parents[1] / "alerts" / "rules.yaml"
RUNBOOKS = re.findall(r"^ +(https://\S+)/\w+[.]md$", RULES.read_text(), re.MULTILINE)[0]
"""The URL of the published runbooks, from the rules."""


def sections(vm_uid: str) -> Mapping[str, Section]:
    """The sections by their title. Each VM links to the dashboard `vm_uid`."""
    url = (
        f"/d/{vm_uid}?${{__url_time_range}}&${{datasource:queryparam}}&${{cluster:queryparam}}"
        "&${job:queryparam}&var-namespace=${__data.fields.namespace}&var-name=${__data.fields.name}"
    )
    return {
        "Alerts": _alerts(),
        "Evacuations": _stuck(url),
        "Blocked VMs": _blocked(url),
        "Repeated migrations": moves.churn(),
        "Callers": moves.callers(),
        "For long time ranges": moves.days(),
    }


def _alerts() -> Section:
    alerts = select_other("ALERTS", 'kubernetes_operator_component="kubevirt-eviction-exporter"')
    contact = select("kubevirt_eviction_exporter_last_contact_timestamp_seconds")
    return [
        table_panel(
            "Alerts that are firing or pending",
            "The alerts of this project in the chosen cluster. Each name links to its runbook. "
            "Without the rules of alerts/ in this Prometheus, the table is always empty.",
            [Column("Alerts", each(("alertname", "severity", "alertstate"), alerts, "count"))],
            size=(16, 7),
            labels={"alertname": "Alert", "severity": "Severity", "alertstate": "State"},
            sort_by="Alerts",
            links={"Alert": ("Open the runbook", f"{RUNBOOKS}/${{__value.text}}.md")},
        ),
        bars_panel(
            "Time since the last contact",
            "Time since the last event, bookmark or list of each resource, in the replica that "
            "has waited longest. A quiet API server sends a bookmark about every minute. If this "
            "time exceeds kube.staleAfter for VMIs, answers are marked as stale. If it exceeds "
            "kube.staleAfter plus kube.deadAfter for a resource, the rules that need the resource "
            "stop blocking.",
            f"time() - {each(('resource',), f'{contact} > 0', 'min')}",
            size=(8, 7),
            legend="{{resource}}",
            unit=units.Seconds,
            steps=((None, GREEN), (90, YELLOW)),
        ),
    ]


def _of_drains(metric: str, how: str = "max") -> str:
    return each(("node",), rename(select_by("node", f"kubevirt_node_drain_{metric}"), "node"), how)


def _stuck(url: str) -> Section:
    by_descheduler = select(STUCK, 'source="descheduler"')
    migrating = each(("node",), select_by("node", VMIS, 'verdict="migration_in_progress"'))
    return [
        stat_panel(
            "Stuck evacuations",
            "Evacuations that failed stuck.failedAttempts times, or are older than stuck.after and "
            "not migrating. Each evacuation that the descheduler requested may hold "
            "one of its eviction slots. If all slots are held (maxNoOfPodsToEvictTotal, often "
            f"{SLOTS}), the descheduler evicts no more VMs.",
            {
                "all": each((), f"sum without (source, state) ({select(STUCK)})"),
                "of the descheduler": each((), f"sum without (state) ({by_descheduler})"),
            },
            size=(8, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, RED)),
            none="0",
        ),
        time_panel(
            "Stuck evacuations by state",
            "What delays the stuck evacuations now. The runbook of KubeVirtEvacuationStuck says "
            "what to do about each state.",
            {"{{state}}": each(("state",), f"sum without (source) ({select(STUCK)})") + " > 0"},
            size=(8, 8),
            unit=units.Short,
            stacked=True,
        ),
        time_panel(
            "Migrations and KubeVirt's limits",
            "VMs of the chosen nodes with a running or waiting migration, and KubeVirt's limits "
            "on parallel migrations. If a limit is reached, further migrations wait (state "
            "capacity). The limits are missing if the exporter may not read the KubeVirt object.",
            {
                "running or waiting": each((), migrating, "sum"),
                "limit: {{scope}}": each(
                    ("scope",), select("kubevirt_eviction_exporter_migration_limit")
                ),
            },
            size=(8, 8),
            unit=units.Short,
        ),
        table_panel(
            "Nodes with evacuations",
            "The progress of each drain. A drain is stuck if no VM has left the node within "
            "stuck.after and at least one evacuation from it is stuck. The command "
            "`python -m exporter node NAME` lists the VMs.",
            [
                Column("Left", _of_drains("left_vmis")),
                Column("Remain", _of_drains("remaining_vmis")),
                Column("Fail or stay", _of_drains("failing_vmis"), red_from=1),
                Column(
                    "Nothing has left for",
                    f"time() - ({_of_drains('last_departure_timestamp_seconds')} or "
                    f"{_of_drains('started_timestamp_seconds', how='min')})",
                    unit=units.DurationSeconds,
                ),
                Column("Stuck", _of_drains("stuck"), answers=YES_IS_BAD),
            ],
            size=(24, 6),
            labels={"node": "Node"},
            sort_by="Nothing has left for",
        ),
        table_panel(
            "Evacuating VMs",
            "Every VM that is being evacuated, the oldest request first. Diverged means that "
            "KubeVirt still evacuates the VM, but the descheduler considers the eviction done. "
            "The command `python -m exporter explain NAMESPACE/NAME` names the next step.",
            [
                Column(
                    None,
                    each_vm("kubevirt_vmi_evacuation_state", by=(*VM, "node", "state")) + " == 1",
                ),
                Column(
                    "Requested",
                    "time() - "
                    + each_vm("kubevirt_vmi_evacuation_requested_timestamp_seconds", how="min"),
                    unit=units.DurationSeconds,
                ),
                Column("Failed attempts", each_vm("kubevirt_vmi_evacuation_failed_attempts")),
                Column(
                    None, each_vm("kubevirt_vmi_evacuation_info", by=(*VM, "source", "strategy"))
                ),
                Column("Stuck", each_vm("kubevirt_vmi_evacuation_stuck"), answers=YES_IS_BAD),
                Column("Diverged", each_vm("kubevirt_vmi_evacuation_diverged"), answers=YES_IS_BAD),
            ],
            size=(24, 10),
            labels={
                "namespace": "Namespace",
                "name": "VM",
                "node": "Node",
                "state": "State",
                "source": "Requested by",
                "strategy": "Strategy",
            },
            sort_by="Requested",
            links={"VM": ("Show this VM", url)},
        ),
    ]


def _blocked(url: str) -> Section:
    blocked = each(("verdict", "node"), select_by("node", VMIS, 'verdict!="allowed"'))
    movable = select_by("node", VMIS, 'verdict="allowed"')
    not_before = "kubevirt_vmi_eviction_not_before_timestamp_seconds"
    return [
        time_panel(
            "Blocked VMs by reason",
            "VMs on the chosen nodes whose eviction is blocked now, by reason.",
            {"{{verdict}}": each(("verdict",), blocked, "sum")},
            size=(6, 10),
            unit=units.Short,
            stacked=True,
        ),
        table_panel(
            "VMs in cooldown",
            "The longest wait first. The cooldown starts at migrationCooldown and doubles with "
            "each further migration inside migrationHistoryWindow, up to maxMigrationCooldown.",
            [
                Column(
                    "Time left",
                    each_vm(not_before, by=(*VM, "node")) + " - time() > 0",
                    unit=units.DurationSeconds,
                ),
                Column(
                    "Cooldown",
                    each_vm("kubevirt_vmi_eviction_cooldown_seconds"),
                    unit=units.DurationSeconds,
                ),
                Column("Migrations in window", each_vm("kubevirt_vmi_migrations_in_window")),
            ],
            size=(12, 10),
            labels={"namespace": "Namespace", "name": "VM", "node": "Node"},
            sort_by="Time left",
            links={"VM": ("Show this VM", url)},
        ),
        bars_panel(
            "VMs that may leave each node",
            "VMs that a descheduler may evict now. A node without such VMs cannot be relieved.",
            each(("node",), movable),
            size=(6, 10),
            legend="{{node}}",
            unit=units.Short,
            steps=((None, RED), (1, GREEN)),
        ),
        moves.load(),
    ]
