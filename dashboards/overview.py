"""The overview of a cluster: whether something is wrong, and what to do about it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    GREEN,
    ONE_IS_RED,
    PER_HOUR,
    PER_MINUTE,
    RED,
    YELLOW,
    YES_IS_BAD,
    Column,
    Steps,
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
    link_to_vm,
    rate,
    rate_other,
    rename,
    select,
    select_by,
    select_other,
)


Section = Sequence[Builder[Panel]]

SLOTS = 5
"""`maxNoOfPodsToEvictTotal` in the policy of the descheduler operator for KubeVirt."""
RULES = Path(__file__).parents[1] / "alerts" / "rules.yaml"
RUNBOOKS = re.findall(r"^ +(https://\S+)/\w+$", RULES.read_text(), re.MULTILINE)[0]
"""The URL of the runbooks, from the rules."""
COMPONENT = 'kubernetes_operator_component="kubevirt-eviction-exporter"'
CONTACT = select("kubevirt_eviction_exporter_last_contact_timestamp_seconds") + " > 0"
OLD: Steps = ((None, YELLOW), (-60, GREEN), (90, YELLOW), (480, RED))
"""A quiet API server sends a bookmark about every minute; after eight minutes an alert fires.

Grafana shows a missing value in the first colour. The clocks of two programs may differ a little.
"""
WEBHOOK = 'name="evictions.kubevirt-eviction-exporter.io"'


def sections(vm_uid: str) -> Mapping[str, Section]:
    """The sections by their title. Each VM links to the dashboard `vm_uid`."""
    url = link_to_vm(vm_uid)
    return {
        "Does anything need me?": _needs(),
        "Alerts": _alerts(),
        "Evacuations": _evacuations(url),
        "Blocked VMs": _blocked(url),
        "Migrations and callers": _callers(),
    }


def _needs() -> Section:
    firing = select_other("ALERTS", COMPONENT, 'alertstate="firing"', 'severity!="info"')
    by_descheduler = select(STUCK, 'source="descheduler"')
    rules = select_other("cluster:kubevirt_eviction_exporter_stuck_evacuations:max")
    return [
        stat_panel(
            "Warnings that are firing",
            "Red: open the runbook of each alert in the table below. Without the rules of alerts/ "
            "in this Prometheus there is no number.",
            {"": f"{each((), firing, 'count')} or 0 * {each((), rules)}"},
            size=(8, 4),
            unit=units.Short,
            steps=((None, YELLOW), (0, GREEN), (1, RED)),
            none="no rules",
        ),
        stat_panel(
            "Stuck",
            "Drains of nodes and evacuations that are stuck. Red: find the node and the VM in the "
            "tables below. Each evacuation of the descheduler may hold one of its eviction slots. "
            f"If all slots are held (maxNoOfPodsToEvictTotal, often {SLOTS}), the descheduler "
            "evicts no more VMs.",
            {
                "drains": each((), _of_drains("stuck"), "sum"),
                "evacuations": each((), f"sum without (source, state) ({select(STUCK)})"),
                "of the descheduler": each((), f"sum without (state) ({by_descheduler})"),
            },
            size=(8, 4),
            unit=units.Short,
            steps=ONE_IS_RED,
            none="0",
        ),
        stat_panel(
            "Age of the data",
            "Time since the last event, bookmark or list of a resource, in the replica that has "
            "waited longest. Yellow: answers may be stale. Red: check the exporter's pods, and "
            "whether they reach the API server. 'no exporter' means that Prometheus scrapes none.",
            {"": f"time() - {each((), CONTACT, 'min')}"},
            size=(8, 4),
            unit=units.Seconds,
            steps=OLD,
            none="no exporter",
        ),
    ]


def _alerts() -> Section:
    alerts = select_other("ALERTS", COMPONENT)
    return [
        table_panel(
            "Alerts that are firing or pending",
            "The alerts of this project in the chosen cluster. Each name links to its runbook.",
            [Column("Alerts", each(("alertname", "severity", "alertstate"), alerts, "count"))],
            size=(16, 7),
            labels={"alertname": "Alert", "severity": "Severity", "alertstate": "State"},
            sort_by="Alerts",
            links={"Alert": ("Open the runbook", f"{RUNBOOKS}/${{__value.text}}")},
            widths={"Alert": 320},
        ),
        bars_panel(
            "Time since the last contact",
            "The age of the data for each resource. If it exceeds kube.staleAfter for VMIs, "
            "answers are marked as stale. If it exceeds kube.staleAfter plus kube.deadAfter for a "
            "resource, the rules that need the resource stop blocking. Red: the runbook of "
            "KubeVirtEvictionExporterStale says what to check.",
            f"time() - {each(('resource',), CONTACT, 'min')}",
            size=(8, 7),
            legend="{{resource}}",
            unit=units.Seconds,
            steps=OLD,
        ),
    ]


def _of_drains(metric: str, how: str = "max") -> str:
    return each(("node",), rename(select_by("node", f"kubevirt_node_drain_{metric}"), "node"), how)


def _evacuations(url: str) -> Section:
    migrating = each(("node",), select_by("node", VMIS, 'verdict="migration_in_progress"'))
    return [
        table_panel(
            "Nodes with evacuations",
            "The progress of each drain. A drain is stuck if no VM has left the node within "
            "stuck.after and at least one VM on it needs a person. Red: run `python -m exporter "
            "node NAME`, which lists the VMs that do not leave and what to do about each.",
            [
                Column("Left", _of_drains("left_vmis")),
                Column("Remain", _of_drains("remaining_vmis")),
                Column("Fail or stay", _of_drains("failing_vmis"), steps=ONE_IS_RED),
                Column(
                    "Nothing has left for",
                    f"time() - ({_of_drains('last_departure_timestamp_seconds')} or "
                    f"{_of_drains('started_timestamp_seconds', how='min')})",
                    unit=units.DurationSeconds,
                ),
                Column("Stuck", _of_drains("stuck"), answers=YES_IS_BAD),
            ],
            size=(24, 5),
            labels={"node": "Node"},
            sort_by="Nothing has left for",
        ),
        table_panel(
            "Evacuating VMs",
            "Every VM that is being evacuated, the oldest request first. Diverged means that "
            "KubeVirt still evacuates the VM, but the descheduler considers the eviction done. "
            "Red: run `python -m exporter explain NAMESPACE/NAME`, which names the next step.",
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
                Column("Failures", each_vm("kubevirt_vmi_evacuation_failed_attempts")),
                Column(
                    None, each_vm("kubevirt_vmi_evacuation_info", by=(*VM, "source", "strategy"))
                ),
                Column("Stuck", each_vm("kubevirt_vmi_evacuation_stuck"), answers=YES_IS_BAD),
                Column("Diverged", each_vm("kubevirt_vmi_evacuation_diverged"), answers=YES_IS_BAD),
            ],
            size=(24, 11),
            labels={
                "namespace": "Namespace",
                "name": "VM",
                "node": "Node",
                "state": "State",
                "source": "Source",
                "strategy": "Strategy",
            },
            sort_by="Requested",
            links={"VM": ("Show this VM", url)},
            widths={"State": 165},
        ),
        time_panel(
            "Stuck evacuations by state",
            "What delays the stuck evacuations. If most have one state, they have one cause: the "
            "runbook of KubeVirtEvacuationStuck says what to do about each state.",
            {"{{state}}": each(("state",), f"sum without (source) ({select(STUCK)})") + " > 0"},
            size=(12, 8),
            unit=units.Short,
            axis="evacuations",
            stacked=True,
            bad=True,
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
            size=(12, 8),
            unit=units.Short,
            axis="migrations",
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
            size=(14, 8),
            unit=units.Short,
            axis="VMs",
            stacked=True,
        ),
        bars_panel(
            "VMs that may leave each node",
            "VMs that a descheduler may evict now. Red: a descheduler cannot relieve the node. If "
            "the node is overloaded, follow the runbook of KubeVirtNodeCannotBeRelieved.",
            each(("node",), movable),
            size=(10, 8),
            legend="{{node}}",
            unit=units.Short,
            steps=((None, RED), (1, GREEN)),
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
            size=(24, 11),
            labels={"namespace": "Namespace", "name": "VM", "node": "Node"},
            sort_by="Time left",
            links={"VM": ("Show this VM", url)},
        ),
    ]


def _callers() -> Section:
    migrations = "kubevirt_eviction_exporter_migrations_total"
    returned = "kubevirt_eviction_exporter_returned_migrations_total"
    reviews = rate("kubevirt_eviction_exporter_admission_reviews_total")
    failed = rate_other("apiserver_admission_webhook_fail_open_count", WEBHOOK)
    return [
        time_panel(
            "Migrations that ended",
            "Migrations per hour, by trigger, outcome and the reason of a failure. The line "
            "'came back' counts migrations back to a node that the VM had left within the "
            "history window: the move away and the move back achieved nothing.",
            {
                "{{trigger}}: {{outcome}} ({{reason}})": (
                    f"3600 * {each(('trigger', 'outcome', 'reason'), rate(migrations))} > 0"
                ),
                "came back": f"3600 * {each((), rate(returned))} > 0",
            },
            size=(24, 8),
            unit=PER_HOUR,
            axis="migrations per hour",
            stacked=True,
            beside=("came back",),
        ),
        time_panel(
            "Outcomes of the descheduler plugin",
            "Decisions of the plugin per minute, by outcome. The outcomes unavailable, stale, "
            "unknown and unnamed are not verdicts: see the alert "
            "KubeVirtDeschedulerWithoutVerdict.",
            {
                "{{outcome}}": "60 * "
                + each(("outcome",), rate_other("descheduler_kubevirt_verdicts_total"), "sum")
            },
            size=(12, 8),
            unit=PER_MINUTE,
            axis="decisions per minute",
        ),
        time_panel(
            "Outcomes of the admission webhook",
            "Evictions per minute that the webhook reviewed, by outcome. The line 'call failed' "
            "counts evictions that the API server allowed because it could not call the webhook: "
            "see the alert KubeVirtEvictionWebhookFailing. This line needs the metrics of the API "
            "server.",
            {
                "{{outcome}}": f"60 * {each(('outcome',), reviews, 'sum')}",
                "call failed": f"60 * {each((), failed, 'sum')}",
            },
            size=(12, 8),
            unit=PER_MINUTE,
            axis="evictions per minute",
        ),
    ]
