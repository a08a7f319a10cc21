"""The dashboard of one VM: its cooldown and its evacuation, now and over time."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    YES_IS_BAD,
    Column,
    stat_panel,
    table_panel,
    time_panel,
    timeline_panel,
)
from dashboards.queries import VM, each_vm


Section = Sequence[Builder[Panel]]

NAMED = 'name="$name"'
NOT_BEFORE = "kubevirt_vmi_eviction_not_before_timestamp_seconds"
COOLDOWN = "kubevirt_vmi_eviction_cooldown_seconds"
REQUESTED = "kubevirt_vmi_evacuation_requested_timestamp_seconds"


def sections() -> Mapping[str, Section]:
    """The sections by their title."""
    return {"Cooldown": _cooldown(), "Evacuation": _evacuation()}


def _cooldown() -> Section:
    left = f"{each_vm(NOT_BEFORE, NAMED)} - time()"
    cooldown = each_vm(COOLDOWN, NAMED)
    in_window = each_vm("kubevirt_vmi_migrations_in_window", NAMED)
    return [
        stat_panel(
            "Cooldown left",
            "Time until the cooldown of the VM ends. A running migration or a requested "
            "evacuation also blocks the VM, but for an unknown time.",
            {"": f"{left} > 0"},
            size=(5, 8),
            unit=units.DurationSeconds,
            none="not in cooldown",
        ),
        stat_panel(
            "Migrations in the window",
            "Migrations that ended inside migrationHistoryWindow and count towards the cooldown.",
            {"": in_window},
            size=(5, 8),
            unit=units.Short,
            none="unknown",
        ),
        time_panel(
            "Cooldown over time",
            "The cooldown after the last migration of the VM, and how much of it is left. Each "
            "further migration inside the window doubles the cooldown, up to the maximum.",
            {"cooldown": f"{cooldown} / 3600", "left": f"clamp_min({left}, 0) / 3600"},
            size=(7, 8),
            unit=units.Hours,
        ),
        time_panel(
            "Migrations over time",
            "Migrations inside the window. A step up is a migration that has ended. A step down "
            "is a migration that has left the window.",
            {"migrations": in_window},
            size=(7, 8),
            unit=units.Short,
            axis="migrations",
        ),
    ]


def _evacuation() -> Section:
    attempts = each_vm("kubevirt_vmi_evacuation_failed_attempts", NAMED)
    return [
        stat_panel(
            "Time since the request",
            "Time since the evacuation was requested.",
            {"": f"time() - {each_vm(REQUESTED, NAMED, how='min')}"},
            size=(5, 6),
            unit=units.DurationSeconds,
            none="no evacuation",
        ),
        stat_panel(
            "Evacuation stuck",
            "yes: the evacuation is stuck because of its age (stuck.after) or its failures "
            "(stuck.failedAttempts). It stays stuck until it succeeds, is cancelled, or the VM "
            "is deleted. One exception: an evacuation in the state 'capacity' that is stuck only "
            "because of its age. It is no longer stuck when another VM has migrated away from the "
            "same node. If KubeVirt's limit for the cluster is reached, any VM's migration has "
            "this effect.",
            {"": each_vm("kubevirt_vmi_evacuation_stuck", NAMED)},
            size=(4, 6),
            unit=units.Short,
            answers=YES_IS_BAD,
            none="no evacuation",
        ),
        stat_panel(
            "Diverged",
            "yes: KubeVirt still evacuates the VM, but its pod lacks the annotation "
            "eviction-in-progress. The descheduler then evicts it again, or evicts another VM.",
            {"": each_vm("kubevirt_vmi_evacuation_diverged", NAMED)},
            size=(4, 6),
            unit=units.Short,
            answers=YES_IS_BAD,
            none="no evacuation",
        ),
        table_panel(
            "Who requested it",
            "With the strategy External, something other than KubeVirt must move the VM.",
            [
                Column(
                    None,
                    each_vm(
                        "kubevirt_vmi_evacuation_info",
                        NAMED,
                        by=("node", "source", "strategy"),
                    ),
                )
            ],
            size=(11, 6),
            labels={
                "node": "Node",
                "source": "Source",
                "strategy": "Strategy",
            },
            sort_by="Node",
        ),
        timeline_panel(
            "State of the evacuation",
            "What delays the evacuation, over time. The runbook of KubeVirtEvacuationStuck says "
            "what to do about each state.",
            each_vm("kubevirt_vmi_evacuation_state", NAMED, by=(*VM, "state")) + " == 1",
            size=(12, 8),
            legend="{{state}}",
            answers={1: ("in this state", "orange")},
        ),
        time_panel(
            "Failed attempts",
            "Failed migrations since the evacuation was requested, including those that KubeVirt "
            "has deleted. KubeVirt waits longer after each failure, from 20 s to about five "
            "minutes.",
            {"failed attempts": attempts},
            size=(12, 8),
            unit=units.Short,
            axis="attempts",
            bad=True,
        ),
    ]
