"""Finds the cooldowns that begin, to observe the length of each once.

A VM that is asked about each minute adds one observation per minute to the histogram of blocked
evictions, so that histogram does not say how long cooldowns are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from exporter.counters import Histogram
from exporter.engine.facts.changes import Key, Notice, NoticeKind
from exporter.engine.facts.mappings import Table
from exporter.engine.facts.model import Instant
from exporter.engine.facts.policy import Policy
from exporter.engine.store.store import Store
from exporter.engine.verdicts.cooldown import CooldownMark, mark_cooldown, measure_cooldown
from exporter.health import Health


@dataclass
class BegunCooldowns:
    """Observes each cooldown when the store shows the migration that it follows.

    Subscribe `record_change` to the notices `EVIDENCE` and `GONE` of the store. What the first
    lists show began before our start, and is not observed.
    """

    store: Store
    policy: Policy
    health: Health
    lengths: Histogram
    clock: Callable[[], Instant]
    _is_ready: bool = False
    _listed: dict[str, str] = field(default_factory=dict)  # migrations of the first lists, by VMI
    _followed: Table[Key, CooldownMark] = field(default_factory=Table)

    def record_change(self, notice: Notice) -> None:
        """Observe the cooldown of one VM, if another migration of it has ended."""
        if notice.kind is NoticeKind.GONE:
            self._listed.pop(notice.uid, None)
            self._followed.pop(notice.key, None)
            return
        vmi, followed = self.store.vmi(notice.key), self._followed.get(notice.key)
        if vmi is None or vmi.migration is None:
            return
        if followed is None:
            followed = CooldownMark(self._listed.get(vmi.uid, ""))
        state, policy = vmi.migration, self.policy.of(vmi)
        if state.ended and state.uid and state.uid == followed.migration:
            return
        self._is_ready = self._is_ready or self.health.ready
        if not self._is_ready and state.ended and state.uid and policy.count_failed_migrations:
            # `measure_cooldown` would take a third of the time of the first list.
            self._listed[vmi.uid] = state.uid
            return
        now = self.clock()
        evidence = self.store.evidence(*notice.key, self.health.read_trust(now))
        cooldown = None if evidence is None else measure_cooldown(evidence, policy, now)
        if evidence is None or cooldown is None:
            return
        mark = self._followed[notice.key] = mark_cooldown(evidence, cooldown)
        if self._is_ready and mark.is_new_after(followed) and cooldown.effective > 0:
            self.lengths.observe(cooldown.effective)
