"""The operator's policy: how long VMIs are blocked, and when an evacuation is stuck."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from exporter.engine.facts.model import Reason, Seconds, Vmi


DEFAULT_POLICY = "default"
"""The name of the policy of VMIs without an override."""


class Policy(Struct, frozen=True, kw_only=True):
    """The operator's policy. Durations are in seconds; a setting of 0 is off."""

    migration_cooldown: Seconds = 900.0
    max_migration_cooldown: Seconds = 21_600.0
    migration_history_window: Seconds = 86_400.0
    count_failed_migrations: bool = True
    guard_pending_migrations: bool = True
    guard_evacuations: bool = True
    guard_platform_update: bool = False
    block: bool = False
    overrides: tuple["Override", ...] = ()

    def of(self, vmi: Vmi) -> "Policy":
        """The policy of one VMI: that of its override, or else this policy."""
        if not vmi.override:
            return self
        return next((one.policy for one in self.overrides if one.name == vmi.override), self)

    def choose(self, namespace: str, labels: Mapping[str, object], priority_class: str) -> str:
        """The name of the first override that matches a VMI; "" if none does."""
        found = (o.name for o in self.overrides if o.matches(namespace, labels, priority_class))
        return next(found, "")

    def choose_by_namespace(self, namespace: str) -> str | None:
        """`choose` by the namespace alone; None if labels or the priority class decide."""
        for one in self.overrides:
            if _fits(namespace, one.namespaces):
                return None if one.vmi_labels or one.priority_classes else one.name
        return ""

    @property
    def matched_labels(self) -> frozenset[str]:
        """The keys of the labels that overrides match."""
        return frozenset(key for one in self.overrides for key, _ in one.vmi_labels)

    @property
    def all(self) -> tuple["Policy", ...]:
        """The policy itself and those of its overrides."""
        return (self, *(one.policy for one in self.overrides))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The reasons for which this policy may block, in the order of the rules."""
        optional = {
            Reason.PLATFORM_UPDATE: self.guard_platform_update,
            Reason.POLICY: any(one.block for one in self.all),
        }
        return tuple(reason for reason in Reason if optional.get(reason, True))

    @property
    def longest_window(self) -> Seconds:
        """The longest history window of any VMI."""
        return max(one.migration_history_window for one in self.all)

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
                (tuple(v for k, v in one.vmi_labels if k == key) for one in (self, later))
                for key, _ in self.vmi_labels
            ),
        )
        return all(
            not mine or (bool(theirs) and all(_fits(one, mine) for one in theirs))
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
