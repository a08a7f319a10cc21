"""Keeps the verdicts of all VMIs current; every answer reads them through `VerdictView.read`.

Evaluating a VMI takes 15 us, so a result is kept as an `Entry` until the VMI changes in the store
or the clock may change the result. `_find_expiry` says when the clock may do so. A VMI that no rule
blocks, and that none can block as time passes, has an entry only if somebody asks about it: this
saves 0.6 kB for most VMIs. The counts per node, the sorted list of blocked VMIs, and the VMIs that
cool down are derived from the entries.

While the end of a VMI's migration lies slightly ahead of our clock, the VMI is evaluated on every
read. All VMIs are evaluated again when KubeVirt begins or ends an update, and when the clock is set
or goes back. The VMIs of a namespace are evaluated again when a resource becomes visible or
invisible, dead or alive there. `advance` works in slices, because 100,000 VMIs take over a second.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from exporter.engine.facts.changes import Key, Notice, NoticeKind
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import settle
from exporter.engine.facts.mappings import Table, add_to_count
from exporter.engine.facts.model import (
    CLOCK_SKEW,
    Checkpoint,
    Instant,
    NodeMobility,
)
from exporter.engine.facts.policy import Policy, PolicyValues, Reason, Verdict
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.engine.verdicts.cooldown import Cooldown, known_ends
from exporter.engine.verdicts.expiries import Expiries
from exporter.engine.verdicts.foreseen import BlockLabels, ForeseenBlocks, foresee_blocks
from exporter.engine.verdicts.rules import RULES, decide_both


ALLOWED = "allowed"
VMIS_AT_ONCE = 20
"""How many VMIs are evaluated, or their verdicts written, without yielding: up to 2 ms."""

_Value = TypeVar("_Value")

Tally: TypeAlias = Mapping[tuple[str, str], int]
"""The number of VMIs by verdict (`ALLOWED` or a reason) and node."""


class Entry(Struct, frozen=True, eq=False, gc=False):
    """The verdicts of one VMI, valid until just before `until`.

    If its cooldown `moves`, the entry is valid at one instant only, but whether it blocks does not
    change before `until`. `settled` decides, with budgets, what a drain would do to the VMI; None
    if more decides that (`Evidence.unsettled`), or if the VMI has ended.
    """

    evidence: Evidence
    filter: Verdict
    pre_eviction: Verdict
    cooldown: Cooldown | None
    until: Instant
    settled: NodeMobility | None

    @property
    def moves(self) -> bool:
        """Whether the end of the cooldown moves with our clock."""
        return self.cooldown is not None and self.cooldown.moves

    def stays_allowed(self, now: Instant) -> bool:
        """Whether no rule blocks the VMI, nor will as time passes, and its outcome is settled.

        A migration whose end is ahead of our clock begins to count when the clock gets there.
        """
        if self.settled is None or _identify(self) is not None or self.moves:
            return False
        return all(end <= now for end in known_ends(self.evidence))

    def verdict(self, checkpoint: Checkpoint | None) -> Verdict:
        """The verdict at one checkpoint, or at both (None): the first rule that blocks counts."""
        if checkpoint is Checkpoint.PRE_EVICTION:
            return self.pre_eviction
        if checkpoint is Checkpoint.FILTER or self.filter.reason is not None:
            return self.filter
        return self.pre_eviction


class VerdictSummary(Struct, frozen=True):
    """The verdicts of all VMIs at one instant, and the entries of those with a cooldown.

    `cooling` has each VMI until its cooldown has ended, even if another rule blocks the VMI.
    `foreseen` are the blocks that may be counted soon.
    """

    verdicts: Tally
    cooling: tuple[Entry, ...]
    foreseen: tuple[BlockLabels, ...]

    def count_by_reason(self) -> Counter[Reason]:
        """The number of blocked VMIs by reason."""
        blocked = Counter[Reason]()
        for (verdict, _), vmis in self.verdicts.items():
            if verdict != ALLOWED:
                blocked[Reason(verdict)] += vmis
        return blocked


class VerdictView:
    """The verdicts for a store under one policy. `read` alone gives them, as of an instant.

    Subscribe `record_change` to all notices of the store.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self.policy = policy
        self._verdicts = Verdicts(store, policy)
        self.record_change: Callable[[Notice], None] = self._verdicts.record_change

    def read(self, now: Instant, trust: Trust, *, most: int = 0) -> "Verdicts":
        """The verdicts at `now`, for use until other tasks run.

        At most `most` outdated VMIs are evaluated at once, the others when they are asked for. All
        instants must come from the same clock, which may go back.
        """
        self._verdicts.advance(now, trust, most=most)
        return self._verdicts


class Verdicts:
    """The verdicts at the instant of the last `advance`.

    `revision` grows when a blocked VMI is added, removed or blocked in another way.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self.policy = policy
        self.revision = 0
        self._idle_rules = [
            (rule, rule.blocks_idle)
            for rule in RULES
            if rule.blocks_idle is not None and any(map(rule.enabled, policy.all))
        ]
        self._store = store
        self._now: Instant = -math.inf
        self._trust = Trust()
        self._entries = Table[Key, Entry]()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._cooling = Table[Key, Entry]()
        self._foreseen = ForeseenBlocks()
        self._blocked: list[Key] = []
        self._unsettled = Table[Key, Evidence]()
        self._outdated: set[Key] = set(store.keys())
        self._moving: set[Key] = set()
        self._expiries = Expiries()

    def record_change(self, notice: Notice) -> None:
        """Mark one VMI or all VMIs as changed, or remove a VMI that is gone."""
        match notice.kind:
            case NoticeKind.EVIDENCE:
                self._outdated.add(notice.key)
            case NoticeKind.GONE:
                self._outdated.discard(notice.key)
                self._replace(notice.key, None)
            case _:
                self._outdated = set(self._store.keys())

    def advance(self, now: Instant, trust: Trust, *, most: int = 0) -> None:
        """Move to `now`, and evaluate at most `most` outdated VMIs. See `VerdictView.read`."""
        keys = self._store.keys()
        if now < self._now:
            self._outdated = set(keys)
        before, self._now, self._trust = self._trust, now, trust
        if before.limits != trust.limits:
            self._outdated.update(
                key for key in keys if before.of(key[0]).limits != trust.of(key[0]).limits
            )
        self._outdated.update(self._expiries.pop(now))
        for _ in range(min(most, len(self._outdated))):
            # An iterator would pass the places of all keys that are gone, in each slice again.
            self._refresh(self._outdated.pop())
        if not self._outdated:
            # An emptied set keeps its size: after 10,000 VMIs, it takes 30 us to iterate over it.
            self._outdated.clear()

    @property
    def is_behind(self) -> bool:
        """Whether some VMIs are outdated."""
        return bool(self._outdated)

    def find(self, namespace: str, name: str) -> Entry | None:
        """The entry of one VMI, or None if there is no VMI of that name."""
        key = (namespace, name)
        entry = self._entries.get(key)
        if entry is None or key in self._outdated or key in self._moving:
            return self._evaluate(key)
        return entry

    def summarize(self) -> VerdictSummary:
        """The counts and the cooling VMIs, as an immutable value."""
        self._refresh_all()
        verdicts, allowed = self._counts.copy(), self._store.nodes
        for (_, node), vmis in self._counts.items():
            allowed[node] -= vmis
        verdicts.update({(ALLOWED, node): vmis for node, vmis in allowed.items() if vmis})
        return VerdictSummary(verdicts, tuple(self._cooling.values()), self._foreseen.read())

    def list_blocked(self) -> Iterator[Entry]:
        """The entries of the VMIs that are blocked now, sorted by namespace and name.

        Each is looked up when it is taken, because 100,000 of them take 25 ms. If a VMI changes
        before that, its entry is the changed one, which may not block it; a VMI that is gone has
        none.
        """
        self._refresh_all()
        entries = map(self._entries.get, self._blocked.copy())
        return (entry for entry in entries if entry is not None)

    def list_unsettled(self) -> list[Evidence]:
        """The evidence about each VMI whose drain outcome depends on more than its mobility.

        The evidence does not change any more, so it can be diagnosed in slices.
        """
        self._refresh_all()
        return list(self._unsettled.values())

    @property
    def moves(self) -> bool:
        """Whether the instants in some entry move with the clock."""
        return bool(self._moving)

    def changes_at(self) -> Instant:
        """When time alone may next change an entry for which `Entry.moves` is false."""
        return self._expiries.next

    def _refresh_all(self) -> None:
        for key in self._outdated | self._moving:
            self._refresh(key)

    def _refresh(self, key: Key) -> None:
        """Evaluate a VMI again, or only remove its entry if the VMI is idle."""
        if not self._may_block_idle(key) and self._store.is_idle(key):
            self._outdated.discard(key)
            self._replace(key, None)
        else:
            self._evaluate(key, is_asked=False)

    def _may_block_idle(self, key: Key) -> bool:
        """Whether a rule may block this VMI even if it is idle."""
        if not self._idle_rules:
            return False
        vmi = self._store.vmi(key) if self.policy.overrides else None
        policy: PolicyValues = self.policy if vmi is None else self.policy.of(vmi)
        updating = self._store.platform_updating
        return any(rule.enabled(policy) and blocks(updating) for rule, blocks in self._idle_rules)

    def _evaluate(self, key: Key, *, is_asked: bool = True) -> Entry | None:
        """Evaluate a VMI, and keep its entry if somebody asks about the VMI or others need it."""
        self._outdated.discard(key)
        evidence = self._store.evidence(*key, self._trust)
        if evidence is None:
            return None
        unsettled = evidence.snapshot() if evidence.unsettled else None
        entry = evaluate(unsettled or evidence, self.policy, self._now)
        is_kept = is_asked or not entry.stays_allowed(self._now)
        self._replace(key, entry if is_kept else None, unsettled)
        return entry

    def _replace(self, key: Key, entry: Entry | None, unsettled: Evidence | None = None) -> None:
        """Replace the entry of a VMI, and update everything that is derived from entries."""
        known = self._entries.pop(key, None)
        was, blocked = _identify(known), _identify(entry)
        if was is not None:
            add_to_count(self._counts, (was.reason, was.node), -1)
        if blocked is not None:
            add_to_count(self._counts, (blocked.reason, blocked.node), 1)
        if was != blocked:
            self.revision += 1
        if (was is None) != (blocked is None):
            place = bisect_left(self._blocked, key)
            self._blocked[place : place + (blocked is None)] = () if blocked is None else (key,)
        self._foreseen.replace(_foresee(known), _foresee(entry))
        cools = entry is not None and entry.cooldown is not None and entry.cooldown.blocks
        _put(self._cooling, key, entry if cools else None)
        _put(self._unsettled, key, unsettled)
        self._moving.discard(key)
        self._expiries.replace(
            key,
            math.inf if known is None else known.until,
            math.inf if entry is None else entry.until,
        )
        if entry is None:
            return
        self._entries[key] = entry
        if entry.moves:
            self._moving.add(key)


def _put(values: dict[Key, _Value], key: Key, value: _Value | None) -> None:
    """Put a value at its place, or remove it if it is None."""
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def evaluate(evidence: Evidence, policy: Policy, now: Instant) -> Entry:
    """The entry of one VMI at `now`; its own policy is chosen here, and nowhere below."""
    values = policy.of(evidence.vmi)
    filtered, pre_eviction, cooldown = decide_both(evidence, values, now)
    until = _find_expiry(evidence, cooldown, values, now)
    vmi = evidence.vmi
    settled = None if vmi.finished or evidence.unsettled else (vmi.node, vmi.mobility)
    return Entry(evidence, filtered, pre_eviction, cooldown, until, settled)


class _Block(NamedTuple):
    """How a VMI is blocked, without the values that change as time passes."""

    reason: Reason
    checkpoints: tuple[Reason | None, Reason | None]
    released_at: Instant | None
    node: str
    uid: str


def _identify(entry: Entry | None) -> _Block | None:
    """How a VMI is blocked; None if it is not blocked."""
    if entry is None:
        return None
    filtered, pre_eviction = entry.filter, entry.pre_eviction
    reason = filtered.reason or pre_eviction.reason
    if reason is None:
        return None
    vmi = entry.evidence.vmi
    checkpoints = (filtered.reason, pre_eviction.reason)
    return _Block(reason, checkpoints, pre_eviction.released_at, vmi.node, vmi.uid)


def _foresee(entry: Entry | None) -> frozenset[BlockLabels]:
    """The blocks of a VMI that may be counted soon."""
    if entry is None:
        return frozenset()
    reasons = (v.reason for v in (entry.filter, entry.pre_eviction) if v.reason is not None)
    return foresee_blocks(entry.evidence, reasons)


def _find_expiry(
    evidence: Evidence, cooldown: Cooldown | None, policy: PolicyValues, now: Instant
) -> Instant:
    """The next instant at which the clock alone may block or release the VMI.

    Such an instant is the end of the cooldown, the time at which a fact becomes too old to be
    believed, or the time at which a migration leaves the window. For an end ahead of our clock it
    is that end if it is at most `CLOCK_SKEW` ahead, or else `CLOCK_SKEW` before that end.
    """
    until = math.inf
    if cooldown is not None and cooldown.blocks:
        until = cooldown.released_at
    for at in evidence.distrusted_from():
        if now < at < until:
            until = at
    for end in known_ends(evidence):
        at = end + policy.migration_history_window
        if end > now:
            at = end - CLOCK_SKEW if settle(end, now) is None else end
        if now < at < until:
            until = at
    return until
