"""The states of an evacuation or another move: what delays it."""

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """What delays an evacuation."""

    # In the order of evaluation, see `engine.evacuations.situation`.
    SHUTTING_DOWN = "shutting_down"
    EXTERNAL = "external"
    ENDED_NOT_FINISHED = "ended_not_finished"
    STALE_MARKER = "stale_marker"
    MIGRATION_STALLED = "migration_stalled"
    MIGRATING = "migrating"
    ZOMBIE_STATE = "zombie_state"
    NOT_MIGRATABLE = "not_migratable"
    MULTIPLE_ACTIVE_PODS = "multiple_active_pods"
    WAITING_FOR_SYNC = "waiting_for_sync"
    QUOTA = "quota"
    BACKUP = "backup"
    UTILITY_VOLUMES = "utility_volumes"
    BACKOFF = "backoff"
    TARGET_GATED = "target_gated"
    TARGET_UNSCHEDULABLE = "target_unschedulable"
    TARGET_NOT_READY = "target_not_ready"
    CAPACITY = "capacity"
    NO_MIGRATION = "no_migration"
    UNKNOWN = "unknown"


NEEDS_PERSON = frozenset(
    {
        State.ENDED_NOT_FINISHED,
        State.MIGRATION_STALLED,
        State.ZOMBIE_STATE,
        State.WAITING_FOR_SYNC,
        State.QUOTA,
    }
)
"""The states of a migratable VM that only a person can end, whether or not it is evacuating."""


class VmimCondition(NamedTuple):
    """A VMIM's condition that keeps it from being handed off: its reason, and the state."""

    reason: str
    state: State


VMIM_CONDITIONS = {
    "decentralizedMigrationBlocked": VmimCondition(
        "DecentralizedNotLiveMigratable", State.WAITING_FOR_SYNC
    ),
    # KubeVirt gives this condition no reason, so its type is used.
    "migrationRejectedByResourceQuota": VmimCondition(
        "migrationRejectedByResourceQuota", State.QUOTA
    ),
    "migrationBlockedByBackup": VmimCondition("BackupInProgress", State.BACKUP),
    "migrationBlockedByUtilityVolumes": VmimCondition(
        "UtilityVolumesPresent", State.UTILITY_VOLUMES
    ),
}
"""By the condition's type (types.go, `VirtualMachineInstanceMigrationConditionType`)."""
