"""What can keep a VM from moving, apart from the states of an evacuation."""

from enum import StrEnum


class Obstacle(StrEnum):
    """What keeps a VM from moving, where its state alone does not say what to do."""

    LEFTOVER = "leftover"
    WITHDRAWN = "withdrawn"
    TAINT_LEFT = "taint_left"
    SOURCE_SILENT = "source_silent"
    HOTPLUG_HANGS = "hotplug_hangs"
    NOT_FINALIZED = "not_finalized"
    STALLED = "stalled"
    LONG_COPY = "long_copy"
    HAND_OFF = "hand_off"
    HAND_OFF_REFUSED = "hand_off_refused"
    TARGET_HANDLER = "target_handler"
    SOURCE_HANDLER = "source_handler"
    POST_COPY = "post_copy"
    POST_COPY_LOST = "post_copy_lost"
    STALE_POD = "stale_pod"
    NO_TARGET_POD = "no_target_pod"
    QUOTA_GATE = "quota_gate"
    QUEUE_GATE = "queue_gate"
    HANDLERS_DOWN = "handlers_down"
    NO_OTHER_NODE = "no_other_node"
    NO_NODE_MATCHES = "no_node_matches"
    ATTACHMENT = "attachment"
    TARGET_NOT_STARTED = "target_not_started"
    TARGET_LOST = "target_lost"
    TARGET_DELETED = "target_deleted"
    NOT_CONVERGING = "not_converging"
    DISK_COPY_SLOW = "disk_copy_slow"
    MIGRATION_ERROR = "migration_error"
    BUDGET = "budget"
    OUTLIVED_POD = "outlived_pod"
    QUIET = "quiet"
    UNEXPLAINED = "unexplained"
    NONE = "none"
    """KubeVirt is working on the evacuation, and nothing is wrong."""


OF_AN_ATTEMPT = frozenset(
    {
        Obstacle.MIGRATION_ERROR,
        Obstacle.UNEXPLAINED,
        Obstacle.TARGET_LOST,
        Obstacle.TARGET_HANDLER,
    }
)
"""The obstacles that a node can cause to every VM that comes."""
