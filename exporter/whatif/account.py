"""The result of a replay: what each policy would have done, in numbers.

`comparison` prints it.
"""

import math
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import Cause
from exporter.engine.facts.model import EndReason, Instant, Seconds
from exporter.engine.facts.policy import Policy, PolicyValues, Reason, StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.store.requesters import Source


FIRST_WIDTH: Seconds = 60.0
"""The width of a series' bins before the first doubling."""
MAX_BINS = 2048
MAX_NAMES = 100
"""How many VMs of each entry of `policy.overrides` are named; all are counted."""


class Contender(Struct, frozen=True, kw_only=True):
    """One of the policies to compare, with its name.

    `restarts_every`: how often the caller restarts, and forgets what it keeps only in memory (see
    `restarts`); 0 if it never does.
    """

    name: str
    policy: Policy = Policy()
    stuck: StuckPolicy = StuckPolicy()
    restarts_every: Seconds = 0.0


_UNGUARDED = replace(
    Policy(),
    **{name: False for name in PolicyValues.__struct_fields__ if name.startswith("guard_")},
)
_REFERENCE = Contender(
    name="reference", policy=replace(_UNGUARDED, migration_history_window=172_800.0)
)
_RECOMMENDED = Contender(name="recommended", policy=Policy(migration_history_window=172_800.0))
BUILTIN: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        _REFERENCE,
        replace(_REFERENCE, name="restarted", restarts_every=86_400.0),
        Contender(name="ours"),
        _RECOMMENDED,
        replace(
            _RECOMMENDED,
            name="successes",
            policy=replace(_RECOMMENDED.policy, count_failed_migrations=False),
        ),
        Contender(
            name="none",
            policy=replace(
                _UNGUARDED,
                migration_cooldown=0.0,
                # Not 0: without a cap, a cooldown lasts at least as long as its migration.
                max_migration_cooldown=1e-9,
                migration_history_window=0.0,
            ),
        ),
    )
}
"""`reference` has the defaults of the reference plugin, and `ours` has our defaults. `restarted` is
the reference plugin if it restarts every day at 0:00 UTC. `recommended` has the policy of our
manifests, and `successes` the same without failed migrations. `none` has no cooldown and no
guard."""
DEFAULT = ("reference", "ours", "recommended", "successes", "none")
"""The policies that are compared if none is given."""


class Distribution(Counter[int]):
    """How often each integer was observed."""

    @property
    def mean(self) -> float:
        """The mean of all observed values, 0 if there is none."""
        return sum(value * times for value, times in self.items()) / (self.total() or 1)

    def quantile(self, share: float) -> int:
        """The quantile at this share (0 to 1); 0 if nothing was observed."""
        left = math.ceil(share * self.total())
        for value in sorted(self):
            left -= self[value]
            if left <= 0:
                return value
        return 0


class TimeSeries(Struct):
    """Amounts over time, in at most `MAX_BINS` bins; if more are needed, their width doubles."""

    began: Instant = 0.0
    width: Seconds = FIRST_WIDTH
    bins: list[float] = []

    def add(self, at: Instant, amount: float) -> None:
        """Add an amount at one instant."""
        number = self.find_or_make_bin(at)
        self.bins[number] += amount

    def spread(self, since: Instant, until: Instant) -> None:
        """Add to each bin the number of its seconds that lie between `since` and `until`."""
        last = self.find_or_make_bin(until)
        for number in range(self.find_or_make_bin(since), last + 1):
            begins = self.began + number * self.width
            overlap = min(until, begins + self.width) - max(since, begins)
            self.bins[number] += max(overlap, 0.0)

    def find_or_make_bin(self, at: Instant) -> int:
        """The index of the bin for `at`; the bin is made if it does not exist yet."""
        while at - self.began >= self.width * MAX_BINS:
            if len(self.bins) % 2:
                self.bins.append(0.0)
            self.bins = [
                left + right for left, right in zip(self.bins[::2], self.bins[1::2], strict=True)
            ]
            self.width *= 2
        number = max(int((at - self.began) / self.width), 0)
        self.bins.extend([0.0] * (number + 1 - len(self.bins)))
        return number


class MigrationCounts(Struct):
    """The migrations that happened.

    `per_vm` has the VMs with a migration that did not fail, and `per_failing_vm` those whose
    migrations all failed: KubeVirt tries them again and again, and no cooldown can prevent that.
    `reasons` says why VMIMs failed, even before their hand-off. A reason that the recording does
    not show is `other`.
    """

    ended: int = 0
    failed: int = 0
    reasons: Counter[EndReason] = field(default_factory=Counter)
    per_vm: Distribution = field(default_factory=Distribution)
    per_failing_vm: Distribution = field(default_factory=Distribution)


class StuckEvacuation(Struct, frozen=True, kw_only=True, rename="camel"):
    """One stuck evacuation, named as in JSON.

    `state` and `stuck_by` have the values when the alert fired or, if it did not fire, when the
    evacuation became stuck. `alerted_at` is None if the evacuation ended before the alert fired.
    `ended_at` is None if the recording ended before the evacuation.
    """

    namespace: str
    name: str
    evacuation_node_name: str
    source: Source
    requested_at: Instant
    stuck_at: Instant
    alerted_at: Instant | None
    ended_at: Instant | None
    state: State
    stuck_by: tuple[Cause, ...]


class Stuck(Struct):
    """The stuck evacuations.

    `minutes_to_alert` is from the request to the alert, `minutes_alerting` from the alert to the
    end, in whole minutes. `longest` has the evacuations that lasted longest, the longest first.
    """

    count: int = 0
    alerted: int = 0
    open_at_end: int = 0
    by_state: Counter[State] = field(default_factory=Counter)
    minutes_to_alert: Distribution = field(default_factory=Distribution)
    minutes_alerting: Distribution = field(default_factory=Distribution)
    longest: list[StuckEvacuation] = []


class Touched(Struct, rename="camel"):
    """The VMs that had the entry `name` of `policy.overrides`, named as in JSON.

    `allowed` and `blocked` count the evictions of these VMs.
    """

    name: str
    vms: int = 0
    first_vms: list[str] = []
    allowed: int = 0
    blocked: int = 0

    def add(self, vm: str) -> None:
        """Add a VM."""
        self.vms += 1
        if len(self.first_vms) < MAX_NAMES and vm not in self.first_vms:
            self.first_vms.append(vm)


class Account(Struct, kw_only=True):
    """What one policy would have done; `others` are evictions that no policy decides about.

    `touched` has the counts of each entry of `policy.overrides`, by its name.
    """

    contender: Contender
    allowed: int = 0
    blocked: Counter[Reason] = field(default_factory=Counter)
    others: int = 0
    migrations: MigrationCounts = field(default_factory=MigrationCounts)
    cooldown_seconds: Seconds = 0.0
    vms_at_cap: int = 0
    stuck: Stuck = field(default_factory=Stuck)
    touched: dict[str, Touched] = {}
    allowed_over_time: TimeSeries = field(default_factory=TimeSeries)
    blocked_over_time: TimeSeries = field(default_factory=TimeSeries)
    cooling_over_time: TimeSeries = field(default_factory=TimeSeries)

    @property
    def asked(self) -> int:
        """The number of evictions that the policy decided about."""
        return self.allowed + self.blocked.total()

    @property
    def series(self) -> tuple[TimeSeries, ...]:
        """All time series of this account."""
        return self.allowed_over_time, self.blocked_over_time, self.cooling_over_time

    def count_decision(
        self, reason: Reason | None, at: Instant, times: int = 1, *, override: str
    ) -> None:
        """Count an eviction: blocked for `reason`, or allowed if None. `times=-1` undoes this.

        `override` is the VM's entry of `policy.overrides`.
        """
        if override:
            touched = self.touched[override]
            touched.allowed += times if reason is None else 0
            touched.blocked += 0 if reason is None else times
        if reason is None:
            self.allowed += times
            self.allowed_over_time.add(at, times)
        else:
            self.blocked[reason] += times
            self.blocked_over_time.add(at, times)


class Comparison(Struct, kw_only=True):
    """The same recording under each policy; `vm_seconds` is the sum of the VMs' lifetimes."""

    began: Instant
    ended: Instant
    events: int
    vms: int
    vm_seconds: Seconds
    accounts: list[Account]
