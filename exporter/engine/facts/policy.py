"""The operator's policy: why and how long VMIs are blocked, and when an evacuation is stuck.

A verdict is the policy's answer for one VMI.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from msgspec import Struct, structs

from exporter.engine.facts.model import Checkpoint, Instant, Mismatch, Seconds, Vmi


MOST_STEPS = 10
DEFAULT_POLICY = "default"
"""The name of the policy of VMIs without an override."""


class Reason(StrEnum):
    """Why a VMI must not be evicted now; these are the values in JSON, metrics and logs."""

    MIGRATION_IN_PROGRESS = "migration_in_progress"
    EVACUATION_IN_PROGRESS = "evacuation_in_progress"
    PLATFORM_UPDATE = "platform_update"
    POLICY = "policy"
    COOLDOWN = "cooldown"


def write_camel_case(field: str) -> str:
    """A field's name as in YAML and JSON: `guard_evacuations` is `guardEvacuations`."""
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))


class ValueWords(NamedTuple):
    """The words for one value of the policy; `off` says what 0 or false means.

    `unit` ends the value's name in answers; a flag has none. `in_plugin`: the plugin
    KubevirtMigrationAware has the value too, and takes 0 as its default.
    """

    label: str
    off: str
    unit: str = ""
    in_plugin: bool = False


COOLDOWN_VALUES = {
    "migration_cooldown": ValueWords("minimum", "no minimum", "Seconds", in_plugin=True),
    "max_migration_cooldown": ValueWords("maximum", "no maximum", "Seconds", in_plugin=True),
    "migration_history_window": ValueWords("window", "no backoff", "Seconds", in_plugin=True),
    "count_failed_migrations": ValueWords(
        "failed migrations count", "failed migrations do not count"
    ),
}
"""The values on which cooldowns depend, by their fields, in the order in which people read them."""
COOLDOWN_DURATIONS = tuple(field for field, words in COOLDOWN_VALUES.items() if words.unit)


def _name_in_answers(field: str) -> str:
    words = COOLDOWN_VALUES.get(field)
    return write_camel_case(field) + (words.unit if words else "")


class PolicyValues(Struct, frozen=True, kw_only=True, rename=_name_in_answers):
    """What the policy sets for one VMI. Durations are in seconds; a setting of 0 is off."""

    migration_cooldown: Seconds = 900.0
    """the shortest cooldown; 0: no minimum"""
    max_migration_cooldown: Seconds = 21_600.0
    """the longest cooldown; 0: no maximum"""
    migration_history_window: Seconds = 86_400.0
    """how long an ended migration counts; 0: no backoff"""
    count_failed_migrations: bool = True
    """whether failed migrations count and start a cooldown"""
    guard_pending_migrations: bool = True
    """whether an unfinished VMIM blocks"""
    guard_evacuations: bool = True
    """whether a requested evacuation blocks"""
    guard_platform_update: bool = False
    """whether all VMs are blocked while KubeVirt updates VMs"""
    block: bool = False
    """whether evictions of the VM are blocked, whatever its migrations, up to admission.maxHold"""


class Policy(PolicyValues, rename=None, frozen=True, kw_only=True):
    """The operator's policy, with its exceptions."""

    overrides: tuple["Override", ...] = ()

    def of(self, vmi: Vmi) -> PolicyValues:
        """The values for one VMI: those of its override, or else of this policy."""
        if not vmi.override:
            return self
        return next((entry.policy for entry in self.overrides if entry.name == vmi.override), self)

    def choose(self, namespace: str, labels: Mapping[str, object], priority_class: str) -> str:
        """The name of the first override that matches a VMI; "" if none does."""
        names = (o.name for o in self.overrides if o.matches(namespace, labels, priority_class))
        return next(names, "")

    def find_override_of_namespace(self, namespace: str) -> str | None:
        """`choose` by the namespace alone; None if labels or the priority class decide."""
        for entry in self.overrides:
            if _fits(namespace, entry.namespaces):
                return None if entry.vmi_labels or entry.priority_classes else entry.name
        return ""

    @property
    def matched_labels(self) -> frozenset[str]:
        """The keys of the labels that overrides match."""
        return frozenset(key for entry in self.overrides for key, _ in entry.vmi_labels)

    @property
    def all(self) -> tuple["Policy", ...]:
        """The policy itself and those of its overrides."""
        return (self, *(entry.policy for entry in self.overrides))

    @property
    def by_field(self) -> dict[str, Any]:
        """The values by the names of the fields, as the log has them."""
        exceptions = [
            structs.asdict(entry) | {"policy": entry.policy.by_field} for entry in self.overrides
        ]
        return structs.asdict(self) | {"overrides": exceptions}

    @property
    def longest_window(self) -> Seconds:
        """The longest history window of any VMI."""
        return max(policy.migration_history_window for policy in self.all)

    @property
    def cooldown_steps(self) -> tuple[Seconds, ...]:
        """The lengths to which short migrations double a cooldown, of all policies, at most
        `MOST_STEPS` of each. Without a floor, the steps lead down from the cap.
        """
        steps = set[Seconds]()
        for policy in self.all:
            floor, cap = policy.migration_cooldown, policy.max_migration_cooldown
            first = floor or cap / 2 ** (MOST_STEPS - 1)
            doubled = (first * 2**step for step in range(MOST_STEPS))
            steps |= {min(length, cap) if cap else length for length in doubled if length}
        return tuple(sorted(steps))

    @property
    def endings_kept(self) -> int:
        """How many endings to keep per VMI: as many as raise the cooldown to its cap.

        `ceil(log2(cap / floor)) + 1`, at least 16; 64 without a floor or cap.
        """
        kept = 16
        for policy in self.all:
            floor, cap = policy.migration_cooldown, policy.max_migration_cooldown
            kept = max(kept, math.ceil(math.log2(cap / floor)) + 1 if floor and cap else 64)
        return kept


class Override(Struct, frozen=True, kw_only=True):
    """An exception from the policy: which VMIs it applies to, and their policy.

    All given fields must match. In a tuple, one matching value is enough. `*` stands for any text.
    `vmi_labels` are keys and values.
    """

    name: str
    policy: Policy
    namespaces: tuple[str, ...] = ()
    vmi_labels: tuple[tuple[str, str], ...] = ()
    priority_classes: tuple[str, ...] = ()

    def shadows(self, later: "Override") -> bool:
        """Whether this override matches every VMI that `later` matches."""
        pairs = (
            (self.namespaces, later.namespaces),
            (self.priority_classes, later.priority_classes),
            *(
                (tuple(v for k, v in entry.vmi_labels if k == key) for entry in (self, later))
                for key, _ in self.vmi_labels
            ),
        )
        return all(
            not mine or (bool(theirs) and all(_fits(value, mine) for value in theirs))
            for mine, theirs in pairs
        )

    def matches(self, namespace: str, labels: Mapping[str, object], priority_class: str) -> bool:
        """Whether the override applies to a VMI with this namespace, labels and priority class."""
        return (
            _fits(namespace, self.namespaces)
            and _fits(priority_class, self.priority_classes)
            and all(
                key in labels and _fits(str(labels[key]), (value,))
                for key, value in self.vmi_labels
            )
        )


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


class Verdict(Struct, frozen=True, kw_only=True, gc=False):
    """The answer for one candidate at one instant.

    `not_before` is the earliest instant at which the VMI would be allowed if nothing else happened.
    If the end of the last migration lies slightly ahead of our clock, `not_before` is computed as
    if the migration had ended now, so it gets later as time passes. `released_at` is computed from
    the end in the object, so it stays the same. In all other cases both are equal.
    """

    known: bool
    mismatch: Mismatch | None = None
    checkpoint: Checkpoint | None = None
    reason: Reason | None = None
    not_before: Instant | None = None
    released_at: Instant | None = None
    effective_cooldown: Seconds | None = None
    migrations_in_window: int = 0

    @property
    def allowed(self) -> bool:
        """Whether the VMI may be evicted at the requested checkpoints."""
        return self.reason is None


class StuckPolicy(Struct, frozen=True, kw_only=True):
    """When an evacuation counts as stuck.

    `external` is the age for the evictionStrategy External; None means never. `retry_backoff` is
    KubeVirt's first pause after a failed evacuation (`migration.go: handleMigrationBackoff`), which
    doubles from there.
    """

    after: Seconds = 1800.0
    failed_attempts: int = 3
    migration_timeout: Seconds = 7200.0
    external: Seconds | None = None
    retry_backoff: Seconds = 20.0
