"""The overview of a cluster, from "is it trustworthy" to "which node can be relieved"."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards import health, moves
from dashboards.looks import (
    GREEN,
    RED,
    YELLOW,
    YES_IS_BAD,
    Column,
    ask_bars,
    ask_over_time,
    ask_stat,
    ask_table,
)
from dashboards.queries import (
    DAY,
    STUCK,
    VM,
    VMIS,
    each,
    each_vm,
    select,
    select_by,
    select_other,
)


Section = Sequence[Builder[Panel]]

SLOTS = 5
"""maxNoOfPodsToEvictTotal in the descheduler operator's policy for KubeVirt."""


def ask(vm_uid: str) -> Mapping[str, Section]:
    """The sections by their title; VMs link to the dashboard `vm_uid`."""
    url = (
        f"/d/{vm_uid}?${{__url_time_range}}&${{datasource:queryparam}}&${{cluster:queryparam}}"
        "&${job:queryparam}&var-namespace=${__data.fields.namespace}&var-name=${__data.fields.name}"
    )
    return {
        "Is it trustworthy?": health.trust(),
        "How is the exporter itself?": health.own(),
        "Which VMs are stuck, and why?": _stuck(url),
        "Who is held, and for how long?": _held(url),
        "Is anything churning?": moves.churn(),
        "What was the descheduler refused?": moves.refused(),
        "Which nodes can be relieved?": _nodes(),
        "Load beside moves": moves.load(),
        "How do the days compare?": moves.days(),
    }


def _stuck(url: str) -> Section:
    by_descheduler = select(STUCK, 'source="descheduler"')
    ended, in_time = (
        f"sum_over_time({select_other(f'cluster:kubevirt_vmi_{name}:count1m')}{DAY})"
        for name in ("evacuations_ended", "evacuations_ended_in_time")
    )
    running = each(("node",), select_by("node", VMIS, 'verdict="migration_in_progress"'))
    return [
        ask_stat(
            "How many are stuck?",
            "Evacuations older than stuck.after without a migration, or that failed "
            "stuck.failedAttempts times.",
            {"": each((), f"sum without (source, state) ({select(STUCK)})")},
            size=(4, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, RED)),
            none="0",
        ),
        ask_stat(
            "How many slots do they hold?",
            "Stuck evacuations that the descheduler asked for. Each may hold one of its slots; "
            f"at maxNoOfPodsToEvictTotal ({SLOTS} unless configured) it evicts nothing more.",
            {"": each((), f"sum without (state) ({by_descheduler})")},
            size=(4, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, YELLOW), (SLOTS, RED)),
            none="0",
        ),
        ask_over_time(
            "Why are they stuck?",
            "Stuck evacuations by what holds them up now. The runbook of KubeVirtEvacuationStuck "
            "says what to do about each.",
            {"{{state}}": each(("state",), f"sum without (source) ({select(STUCK)})") + " > 0"},
            size=(8, 8),
            unit=units.Short,
            stacked=True,
        ),
        ask_over_time(
            "Which evacuations keep failing?",
            "Failed migrations since the evacuation was requested, of the ten VMs with the most. "
            "KubeVirt retries for ever, and keeps five of them: what failed before the exporter "
            "looked is not counted.",
            {
                "{{namespace}}/{{name}}": (
                    f"topk(10, {each_vm('kubevirt_vmi_evacuation_failed_attempts')} > 0)"
                )
            },
            size=(8, 8),
            unit=units.Short,
        ),
        ask_table(
            "Which VMs are asked to leave their node, since when, and what holds them up?",
            "Every VM that is being evacuated, the oldest request first. Diverged: KubeVirt still "
            "evacuates it while the descheduler believes the eviction over. The exporter's "
            "/v1/evacuations tells the next step for each.",
            [
                Column(
                    None,
                    each_vm("kubevirt_vmi_evacuation_state", by=(*VM, "node", "state")) + " == 1",
                ),
                Column(
                    "Asked for",
                    "time() - "
                    + each_vm("kubevirt_vmi_evacuation_requested_timestamp_seconds", how="min"),
                    unit=units.DurationSeconds,
                ),
                Column("Failed attempts", each_vm("kubevirt_vmi_evacuation_failed_attempts")),
                Column(
                    None, each_vm("kubevirt_vmi_evacuation_info", by=(*VM, "source", "strategy"))
                ),
                Column("Stuck?", each_vm("kubevirt_vmi_evacuation_stuck"), answers=YES_IS_BAD),
                Column(
                    "Diverged?", each_vm("kubevirt_vmi_evacuation_diverged"), answers=YES_IS_BAD
                ),
            ],
            size=(24, 10),
            labels={
                "namespace": "Namespace",
                "name": "VM",
                "node": "Node",
                "state": "State",
                "source": "Asked by",
                "strategy": "Strategy",
            },
            sort_by="Asked for",
            links={"VM": ("Show this VM", url)},
        ),
        ask_over_time(
            "Are the migration limits full?",
            "VMs that are being migrated away from the chosen nodes, and KubeVirt's limits, where "
            "its KubeVirt object may be read. At the limit evacuations wait (capacity).",
            {
                "running": each((), running, "sum"),
                "limit: {{scope}}": each(
                    ("scope",), select("kubevirt_eviction_exporter_migration_limit")
                ),
            },
            size=(12, 8),
            unit=units.Short,
        ),
        ask_over_time(
            "What share of the evacuations ended within 30 minutes?",
            "Of the evacuations that ended within a day, by success, cancelling or deletion: those "
            "whose request was not older than 30 minutes then. From the rules of alerts/.",
            {"in time": f"{each((), in_time, 'sum')} / ({each((), ended, 'sum')} > 0)"},
            size=(12, 8),
            unit=units.PercentUnit,
            most=1,
        ),
    ]


def _held(url: str) -> Section:
    held = each(("verdict", "node"), select_by("node", VMIS, 'verdict!="allowed"'))
    not_before = "kubevirt_vmi_eviction_not_before_timestamp_seconds"
    return [
        ask_over_time(
            "How many VMs may not be moved, and why?",
            "VMs on the chosen nodes by the verdict that a descheduler would get now; allowed is "
            "left out.",
            {"{{verdict}}": each(("verdict",), held, "sum")},
            size=(8, 10),
            unit=units.Short,
            stacked=True,
        ),
        ask_table(
            "Which VMs are held, and for how much longer?",
            "VMs in cooldown, the longest wait first. The cooldown starts at migrationCooldown "
            "and doubles with each migration inside migrationHistoryWindow, up to "
            "maxMigrationCooldown.",
            [
                Column(
                    "Held for another",
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
            size=(16, 10),
            labels={"namespace": "Namespace", "name": "VM", "node": "Node"},
            sort_by="Held for another",
            links={"VM": ("Show this VM", url)},
        ),
    ]


def _nodes() -> Section:
    vmis = select_by("node", VMIS)
    movable = select_by("node", VMIS, 'verdict="allowed"')
    # Divided within each replica: two maxima may be of different instants.
    share = f"({movable}) / ignoring (verdict) sum without (verdict) ({vmis})"
    return [
        ask_bars(
            "How many VMs may leave each node now?",
            "VMs that a descheduler would be allowed to evict. A node without any cannot be "
            "relieved, however loaded it is.",
            each(("node",), movable),
            size=(12, 9),
            legend="{{node}}",
            unit=units.Short,
            steps=((None, RED), (1, GREEN)),
        ),
        ask_over_time(
            "What share of each node's VMs may leave it?",
            "Near 1 is free to move. A node that stays near 0 is held by cooldowns, or by "
            "evacuations that do not end.",
            {"{{node}}": each(("node",), share)},
            size=(12, 9),
            unit=units.PercentUnit,
            most=1,
        ),
    ]
