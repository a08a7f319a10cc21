"""One VM: whether it is held or being evacuated, and how it got there."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    YES_IS_BAD,
    Column,
    ask_over_time,
    ask_stat,
    ask_table,
    ask_timeline,
)
from dashboards.queries import VM, each_vm


Section = Sequence[Builder[Panel]]

NAMED = 'name="$name"'
NOT_BEFORE = "kubevirt_vmi_eviction_not_before_timestamp_seconds"
COOLDOWN = "kubevirt_vmi_eviction_cooldown_seconds"
REQUESTED = "kubevirt_vmi_evacuation_requested_timestamp_seconds"


def ask() -> Mapping[str, Section]:
    """The sections by their title."""
    return {"Is it held?": _held(), "Is it being evacuated?": _evacuated()}


def _held() -> Section:
    left = f"{each_vm(NOT_BEFORE, NAMED)} - time()"
    cooldown = each_vm(COOLDOWN, NAMED)
    in_window = each_vm("kubevirt_vmi_migrations_in_window", NAMED)
    return [
        ask_stat(
            "How much longer is it held?",
            "Time until its cooldown is over. A migration that runs or an evacuation that is "
            "asked for holds it too, without a known end.",
            {"": f"{left} > 0"},
            size=(4, 8),
            unit=units.DurationSeconds,
            none="not in cooldown",
        ),
        ask_stat(
            "How often was it migrated?",
            "Migrations that ended inside the window and count towards its cooldown.",
            {"": in_window},
            size=(4, 8),
            unit=units.Short,
            none="nothing known",
        ),
        ask_over_time(
            "How did its cooldown grow and run out?",
            "The cooldown that its last migration earned it, and what is left of it. Each "
            "migration inside the window doubles it, up to the cap.",
            {"cooldown": cooldown, "left": f"clamp_min({left}, 0)"},
            size=(8, 8),
            unit=units.Seconds,
        ),
        ask_over_time(
            "When was it migrated?",
            "Migrations inside the window: a step up is one that ended, a step down is one that "
            "left the window.",
            {"migrations": in_window},
            size=(8, 8),
            unit=units.Short,
        ),
    ]


def _evacuated() -> Section:
    attempts = each_vm("kubevirt_vmi_evacuation_failed_attempts", NAMED)
    return [
        ask_stat(
            "Asked to leave for how long?",
            "Time since the evacuation was requested.",
            {"": f"time() - {each_vm(REQUESTED, NAMED, how='min')}"},
            size=(4, 6),
            unit=units.DurationSeconds,
            none="it is not",
        ),
        ask_stat(
            "Is its evacuation stuck?",
            "By its age (stuck.after) or by its failures (stuck.failedAttempts). Only success, "
            "cancelling or deletion ends it.",
            {"": each_vm("kubevirt_vmi_evacuation_stuck", NAMED)},
            size=(4, 6),
            unit=units.Short,
            answers=YES_IS_BAD,
            none="no evacuation",
        ),
        ask_stat(
            "Has the descheduler lost it?",
            "yes: KubeVirt still evacuates it, and its pod no longer says so. The descheduler "
            "then asks again, or picks another VM.",
            {"": each_vm("kubevirt_vmi_evacuation_diverged", NAMED)},
            size=(4, 6),
            unit=units.Short,
            answers=YES_IS_BAD,
            none="no evacuation",
        ),
        ask_table(
            "Who asked, and which node is it to leave?",
            "The strategy External means that somebody else than KubeVirt moves it.",
            [
                Column(
                    None,
                    each_vm(
                        "kubevirt_vmi_evacuation_info",
                        NAMED,
                        by=(*VM, "node", "source", "strategy"),
                    ),
                )
            ],
            size=(12, 6),
            labels={
                "namespace": "Namespace",
                "name": "VM",
                "node": "Node",
                "source": "Asked by",
                "strategy": "Strategy",
            },
            sort_by="Node",
        ),
        ask_timeline(
            "What has held it up, and since when?",
            "The state of its evacuation over time. The runbook of KubeVirtEvacuationStuck says "
            "what to do about each.",
            each_vm("kubevirt_vmi_evacuation_state", NAMED, by=(*VM, "state")) + " == 1",
            size=(12, 8),
            legend="{{state}}",
            answers={1: ("in this state", "orange")},
        ),
        ask_over_time(
            "How many of its migrations have failed?",
            "Failures since the evacuation was requested, beyond the five that KubeVirt keeps. "
            "KubeVirt doubles its pause after each, from 20 s to about five minutes.",
            {"failed attempts": attempts},
            size=(12, 8),
            unit=units.Short,
        ),
    ]
