"""What all VMIs come to: how many may be evicted on each node, and which cool down.

Theory. What is true is what `cooldown` says of each VMI. A `Register` comes to that without asking
it of all, because at 100,000 VMIs this takes 130 ms in which no verdict is answered: it keeps one
entry for each VMI that is blocked or that the clock alone may change, and looks again only at those
of which the store has had news, or whose entry has run out. All others are allowed, and the store
knows how many there are on each node.

An entry holds from the instant of its look until the clock changes the arithmetic behind it
(`cooldown.holds_until`). Where that is at once, because an end lies just ahead of our clock, the
VMI is looked at in every census. What changes everything (permissions, silence of the API
server, a clock that goes back) has the register start over. Looking is done in slices, by
`catch_up`; `read` does what is left of it and gives the census of that one instant.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, TypeAlias

from msgspec import Struct

from exporter.engine.cooldown import Cooldown, decide, holds_until, is_quiet, measure_cooldown
from exporter.engine.evidence import Evidence
from exporter.engine.model import Instant, Policy, Reason, Vmi
from exporter.engine.store import Key, Store


ALLOWED = "allowed"
SPARE = 1_000
"""So many ends of entries that were replaced are not worth a look at all of them."""

Tally: TypeAlias = Mapping[tuple[str, str], int]
"""How many VMIs there are, by what they would be answered (`ALLOWED` or a reason) and by node."""


class Cooling(Struct, frozen=True, gc=False):
    """A VMI whose cooldown holds. `written` is what `metrics` has written of it."""

    vmi: Vmi
    cooldown: Cooldown
    written: Any = None


class Census(Struct, frozen=True):
    """What all VMIs came to at one instant. Nothing that comes later changes it."""

    verdicts: Tally
    cooling: tuple[Cooling, ...]


class _Entry(Struct, frozen=True, gc=False):
    """What one VMI came to when it was looked at, and until when it does."""

    node: str
    reason: Reason | None
    until: Instant
    cooling: Cooling | None = None


class Register:
    """The census of a store under one policy, kept current with each change.

    The instants that it is asked with are those of one clock, whatever that does.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self._store = store
        self._policy = policy
        self._basis: tuple[object, ...] = ()
        self._looked_at: Instant = -math.inf
        self._entries: dict[Key, _Entry] = {}
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._cooling: dict[Key, Cooling] = {}
        self._outdated: set[Key] = set()
        self._restless: set[Key] = set()
        self._ends: list[tuple[Instant, Key]] = []
        store.observers.append(self)

    def __len__(self) -> int:
        """How much is kept: entries, ends that are awaited, VMIs that are always looked at."""
        return len(self._entries) + len(self._ends) + len(self._restless)

    def note_change(self, key: Key) -> None:
        """There is news of this VMI."""
        self._outdated.add(key)

    def note_end(self, key: Key) -> None:
        """The VMI is gone."""
        self._outdated.discard(key)
        self._replace(key, None, self._looked_at)

    def catch_up(self, now: Instant, *, silent: bool, most: int) -> bool:
        """Look again at so many VMIs at most; True where others are left to look at."""
        self._find_outdated(now, silent=silent)
        for key in list(islice(self._outdated, most)):
            self._look(key, now, silent=silent)
        return bool(self._outdated)

    def read(self, now: Instant, *, silent: bool) -> Census:
        """The census at `now`; `silent` as in `decide`."""
        self._look_at_all(now, silent=silent)
        verdicts = +self._blocked
        for node, vmis in self._store.nodes.items():
            allowed = vmis - sum(self._blocked[reason, node] for reason in Reason)
            if allowed:
                verdicts[ALLOWED, node] = allowed
        return Census(verdicts, tuple(self._cooling.values()))

    def find_loud(self, now: Instant, *, silent: bool) -> Iterator[Evidence]:
        """Every VMI that is blocked at `now`, or that the clock alone may change."""
        self._look_at_all(now, silent=silent)
        for key in self._entries:
            evidence = self._store.evidence(*key)
            if evidence is not None:
                yield evidence

    def _look_at_all(self, now: Instant, *, silent: bool) -> None:
        self._find_outdated(now, silent=silent)
        for key in self._outdated | self._restless:
            self._look(key, now, silent=silent)

    def _find_outdated(self, now: Instant, *, silent: bool) -> None:
        """Of whom what is kept does not hold at `now`, but for those that it never holds of."""
        store = self._store
        basis = (silent, store.vmims_seen, store.pods_seen, dict(store.blind))
        if basis != self._basis or now < self._looked_at:
            self._basis = basis
            for kept in (self._entries, self._blocked, self._cooling, self._restless, self._ends):
                kept.clear()
            self._outdated = set(store.keys())
        self._looked_at = now
        while self._ends and self._ends[0][0] <= now:
            until, key = heappop(self._ends)
            entry = self._entries.get(key)
            if entry is not None and entry.until == until:
                self._outdated.add(key)

    def _look(self, key: Key, now: Instant, *, silent: bool) -> None:
        self._outdated.discard(key)
        evidence = self._store.evidence(*key)
        if evidence is not None:
            self._replace(key, _look_at(evidence, self._policy, now, silent=silent), now)

    def _replace(self, key: Key, entry: _Entry | None, now: Instant) -> None:
        """Keep this entry in the place of the one before, if it says anything."""
        known = self._entries.pop(key, None)
        if known is not None and known.reason is not None:
            self._blocked[known.reason, known.node] -= 1
        self._restless.discard(key)
        if entry is None or entry.cooling is None:
            self._cooling.pop(key, None)
        if entry is None or (entry.reason is None and entry.until == math.inf):
            return
        self._entries[key] = entry
        if entry.reason is not None:
            self._blocked[entry.reason, entry.node] += 1
        if entry.cooling is not None:
            self._cooling[key] = entry.cooling
        if entry.until <= now:
            self._restless.add(key)
        elif entry.until < math.inf:
            self._await_end(entry.until, key)

    def _await_end(self, until: Instant, key: Key) -> None:
        """Ends of entries that were replaced stay until their time, or until they are too many."""
        heappush(self._ends, (until, key))
        if len(self._ends) > 2 * len(self._entries) + SPARE:
            self._ends = [(e.until, k) for k, e in self._entries.items() if e.until < math.inf]
            heapify(self._ends)


def _look_at(evidence: Evidence, policy: Policy, now: Instant, *, silent: bool) -> _Entry:
    vmi = evidence.vmi
    if is_quiet(evidence):
        return _Entry(vmi.node, None, math.inf)
    verdict = decide(evidence, policy, now, silent=silent)
    cooldown = measure_cooldown(evidence, policy, now)
    cooling = None if cooldown is None or not cooldown.blocks else Cooling(vmi, cooldown)
    return _Entry(vmi.node, verdict.reason, holds_until(evidence, policy, now), cooling)
