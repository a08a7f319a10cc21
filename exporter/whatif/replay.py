"""What would these settings have done? The engine over a recording, with the recording's clock.

Theory. Each policy has a world of its own, a `Store` as the running exporter has, and all worlds
are played in one pass. An eviction is a VMI whose `evacuationNodeName` becomes set, or set to
another node, by an event (not in the first list). At that instant each world is asked, as a
descheduler would have asked: both checkpoints, on the evidence from just before.

Allowed: the world takes it, and all that followed from it, as it happened. Refused: that
evacuation does not happen in that world. Its marker, its VMIMs and the `migrationState` of its
migrations are kept from it, so that they count towards no later cooldown there. Nothing is
invented in its place: the descheduler's next attempt is in the recording, or it is not.

Always happening, because nobody is asked: evacuations whose source is known to be another than
the descheduler (VMIM priority `system-critical`: drains and maintenance; told only a moment after
the marker, so that what was answered is taken back), and migrations without an evacuation (users,
workload updates). An eviction of unknown source counts as the descheduler's.

Limits. What was asked for and changed nothing left no trace: an eviction of a VMI that evacuates
already is in no recording, so that the guard `evacuations` shows next to nothing. And the loop is
open. Where a VM stays in a world, its node, its pods and its load are as recorded all the same, the
descheduler's further choices too. A recording of a cluster in which somebody refused evictions
already shows fewer of them. So the numbers compare policies over the same demand; they do not
foretell a cluster.

A Store cannot take an ending back: where the watch of VMIs is late by a whole migration, a VMIM
that finished before its marker was told counts towards backoff even in a world that then refuses
that evacuation. And a `system-critical` VMIM takes back the request before it whenever it comes:
a drain that joins a descheduler's evacuation hours later makes all of it a drain's.

Memory is that of the VMs that live at once, for each policy; what VMs have left behind is counted.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappush, heappushpop

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.engine.cooldown import measure_cooldown
from exporter.engine.diagnosis import Cause, Diagnosis, Source, State, diagnose
from exporter.engine.evidence import Evidence
from exporter.engine.model import (
    Instant,
    MigrationLimits,
    MigrationState,
    Outcome,
    Pod,
    Policy,
    Priority,
    Reason,
    Resource,
    Seconds,
    StuckPolicy,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.rules import decide
from exporter.engine.store import Key, Store
from exporter.whatif.recording import Kind, Recorded


ALERT_FOR: Seconds = 300.0
"""The `for` of the alert KubeVirtEvacuationStuck."""
STUCK_TOLD = 100
"""How many stuck evacuations are told one by one, those that lasted longest."""
FIRST_WIDTH: Seconds = 60.0
MOST_BINS = 2048


class Contender(Struct, frozen=True, kw_only=True):
    """One of the settings to compare."""

    name: str
    policy: Policy = Policy()
    stuck: StuckPolicy = StuckPolicy()


BUILTIN: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            name="reference", policy=Policy(guard_pending_migrations=False, guard_evacuations=False)
        ),
        Contender(name="ours"),
        Contender(
            name="none",
            policy=Policy(
                migration_cooldown=0.0,
                # Not 0, which is no cap: a migration's own duration is the least cooldown.
                max_migration_cooldown=1e-9,
                migration_history_window=0.0,
                guard_pending_migrations=False,
                guard_evacuations=False,
            ),
        ),
    )
}
"""The reference plugin's defaults, ours, and neither cooldown nor guards."""


class Histogram(Struct):
    """How often each whole number came."""

    counts: dict[int, int] = {}

    def add(self, value: int) -> None:
        """One more."""
        self.counts[value] = self.counts.get(value, 0) + 1

    @property
    def total(self) -> int:
        """How many were added."""
        return sum(self.counts.values())

    @property
    def sum(self) -> int:
        """The sum of what was added."""
        return sum(value * times for value, times in self.counts.items())

    @property
    def most(self) -> int:
        """The greatest, 0 of none."""
        return max(self.counts, default=0)

    def quantile(self, share: float) -> int:
        """The smallest number that so many (0 to 1) are not above; 0 of none."""
        left = math.ceil(share * self.total)
        for value in sorted(self.counts):
            left -= self.counts[value]
            if left <= 0:
                return value
        return 0


class Timeline(Struct):
    """Amounts over time, in at most `MOST_BINS` bins that double their width as time goes on."""

    began: Instant
    width: Seconds = FIRST_WIDTH
    bins: list[float] = []

    def add(self, at: Instant, amount: float) -> None:
        """So much happened at one instant."""
        number = self._reach(at)
        self.bins[number] += amount

    def spread(self, since: Instant, until: Instant) -> None:
        """One unit lasted from `since` to `until`: each bin gets its seconds of it."""
        last = self._reach(until)
        for number in range(self._reach(since), last + 1):
            begins = self.began + number * self.width
            overlap = min(until, begins + self.width) - max(since, begins)
            self.bins[number] += max(overlap, 0.0)

    def extend(self, until: Instant) -> None:
        """Time went on until then."""
        self._reach(until)

    def _reach(self, at: Instant) -> int:
        while at - self.began >= self.width * MOST_BINS:
            if len(self.bins) % 2:
                self.bins.append(0.0)
            self.bins = [
                one + two for one, two in zip(self.bins[::2], self.bins[1::2], strict=True)
            ]
            self.width *= 2
        number = max(int((at - self.began) / self.width), 0)
        self.bins.extend([0.0] * (number + 1 - len(self.bins)))
        return number


class Migrations(Struct):
    """The migrations that happened; `per_vm` has those VMs that moved."""

    ended: int = 0
    failed: int = 0
    per_vm: Histogram = field(default_factory=Histogram)


class StuckEvacuation(Struct, frozen=True, kw_only=True):
    """One evacuation that was found stuck.

    `state` is that at the alert, or where there was none at the first instant. `alerted_at` is
    None where it was over before the alert would have fired, `ended_at` where it was not over at
    the recording's end.
    """

    namespace: str
    name: str
    node: str
    source: Source
    requested_at: Instant
    stuck_at: Instant
    alerted_at: Instant | None
    ended_at: Instant | None
    state: State
    causes: tuple[Cause, ...]


class Stuck(Struct):
    """The stuck evacuations.

    `minutes_to_alert` is from the request to the alert, `minutes_alerting` from there to the end,
    whole minutes each; `longest` are those that lasted longest, the longest first.
    """

    found: int = 0
    alerted: int = 0
    open_at_end: int = 0
    by_state: dict[State, int] = {}
    minutes_to_alert: Histogram = field(default_factory=Histogram)
    minutes_alerting: Histogram = field(default_factory=Histogram)
    longest: list[StuckEvacuation] = []


class Account(Struct, kw_only=True):
    """What one policy would have done. `others` were asked about by nobody."""

    contender: Contender
    allowed: int = 0
    refused: dict[Reason, int] = {}
    others: int = 0
    migrations: Migrations = field(default_factory=Migrations)
    cooldown_seconds: Seconds = 0.0
    vms_at_cap: int = 0
    stuck: Stuck = field(default_factory=Stuck)
    allowed_over_time: Timeline
    refused_over_time: Timeline
    cooling_over_time: Timeline

    @property
    def asked(self) -> int:
        """How many evictions it was asked about."""
        return self.allowed + self.refused_in_all

    @property
    def refused_in_all(self) -> int:
        """How many of them it refused."""
        return sum(self.refused.values())


class Comparison(Struct, kw_only=True):
    """What each policy would have done with the same recording; `vm_seconds` is all VMs' time."""

    began: Instant
    ended: Instant
    events: int
    vms: int
    vm_seconds: Seconds
    accounts: list[Account]


class _Life(Struct):
    """A VMI as it really was: what it says now, and since when it is counted."""

    vmi: Vmi
    since: Instant


class _Request(Struct):
    """An eviction that a world was asked about, until its evacuation is over.

    `node` is "" once it is. `is_asked` is false where somebody else evicted, who asks nobody.
    `reason` is why it was refused. `kept_out` are its migrations, which
    are kept from the world, by UID (VMIMs that have none: by name), `former` those of requests
    before it.
    """

    node: str
    at: Instant
    is_asked: bool = True
    reason: Reason | None = None
    kept_out: set[str] = set()
    former: set[str] = set()

    def keeps_out(self, name: str) -> bool:
        """Whether a migration did not happen in this world."""
        return name in self.kept_out or name in self.former


class _Tally(Struct):
    """What is counted of one VMI in one world.

    It cools down from `since` to `until`, by the migration and the revision of its history that
    were `read`.
    """

    migrations: int = 0
    read: tuple[MigrationState | None, int] = (None, 0)
    since: Instant = 0.0
    until: Instant = 0.0
    at_cap: bool = False


class _Open(Struct):
    """An evacuation that goes on in one world; `look_at` is when the clock alone may change it."""

    vmi: Vmi
    node: str
    requested_at: Instant
    look_at: Instant = math.inf
    stuck_at: Instant | None = None
    found: Diagnosis | None = None


class Replay:
    """Plays events for several contenders at once: `take` each, then `finish`."""

    def __init__(self, contenders: Iterable[Contender]) -> None:
        self._lives: dict[Key, _Life] = {}
        self._vmims: dict[Key, Vmim] = {}
        self._attempts: dict[Key, dict[str, Vmim]] = {}
        self._now: Instant = 0.0
        self._events = 0
        self._vms = 0
        self._vm_seconds: Seconds = 0.0
        self._began: Instant | None = None
        self._worlds = [_World(contender, self._attempts) for contender in contenders]

    @property
    def now(self) -> Instant:
        """The virtual clock: the latest instant of an event."""
        return self._now

    @property
    def events(self) -> int:
        """How many events were taken."""
        return self._events

    def take(self, event: Recorded) -> None:
        """The next event. One that is told late happens at the latest instant told before."""
        self._events += 1
        self._now = max(self._now, event.at)
        if self._began is None and event.kind is not Kind.ADDED:
            self._begin()
        for world in self._worlds:
            world.pass_time(self._now)
        match event.fact:
            case Vmi() as vmi:
                self._take_vmi(vmi)
            case Vmim() as vmim:
                self._take_vmim(vmim)
            case Pod() | MigrationLimits() as fact:
                for world in self._worlds:
                    world.store.put(fact)
            case _:
                self._take_absence(event)
        if event.resource is not None:
            self._see(event.resource, seen=event.kind is not Kind.REFUSED)

    def finish(self) -> Comparison:
        """The recording is over: what each policy would have done."""
        if self._began is None:
            self._begin()
        began = self._now if self._began is None else self._began
        for life in self._lives.values():
            self._vm_seconds += self._now - life.since
        return Comparison(
            began=began,
            ended=self._now,
            events=self._events,
            vms=self._vms,
            vm_seconds=self._vm_seconds,
            accounts=[world.close(self._now) for world in self._worlds],
        )

    def _begin(self) -> None:
        """The first list is over: from here on time counts."""
        self._began = self._now
        for life in self._lives.values():
            life.since = self._now
        for world in self._worlds:
            world.begin(self._now)

    def _see(self, resource: Resource, *, seen: bool) -> None:
        for world in self._worlds:
            if resource is Resource.VMIMS:
                world.store.vmims_seen = seen
            elif resource is Resource.PODS:
                world.store.pods_seen = seen

    def _take_vmi(self, vmi: Vmi) -> None:
        key = (vmi.namespace, vmi.name)
        life = self._lives.get(key)
        if life is not None and life.vmi.uid != vmi.uid:
            self._end_life(key, life)
            life = None
        before = None if life is None or self._began is None else life.vmi
        if life is None:
            self._vms += 1
            self._lives[key] = _Life(vmi, self._now)
        else:
            life.vmi = vmi
        for world in self._worlds:
            world.take_vmi(vmi, before)

    def _take_vmim(self, vmim: Vmim) -> None:
        key = (vmim.namespace, vmim.name)
        before = self._vmims.get(key)
        is_new = before is None or before.uid != vmim.uid
        if before is not None:
            self._forget_attempt(before)
        self._vmims[key] = vmim
        self._attempts.setdefault((vmim.namespace, vmim.vmi_name), {})[_name_of(vmim)] = vmim
        life = self._lives.get((vmim.namespace, vmim.vmi_name))
        for world in self._worlds:
            world.take_vmim(vmim, None if life is None else life.vmi, is_new=is_new)

    def _take_absence(self, event: Recorded) -> None:
        key = (event.namespace, event.name)
        if event.kind is not Kind.DELETED or event.resource is None:
            return
        life = self._lives.get(key)
        if event.resource is Resource.VMIS:
            if life is not None and event.uid in ("", life.vmi.uid):
                self._end_life(key, life)
            return
        vmim = self._vmims.pop(key, None) if event.resource is Resource.VMIMS else None
        if vmim is not None:
            self._forget_attempt(vmim)
        for world in self._worlds:
            world.store.remove(event.resource, *key, event.uid)
            owner = None if vmim is None else self._lives.get((vmim.namespace, vmim.vmi_name))
            if owner is not None:
                world.lose_vmim(owner.vmi)

    def _forget_attempt(self, vmim: Vmim) -> None:
        owner = (vmim.namespace, vmim.vmi_name)
        attempts = self._attempts.get(owner, {})
        attempts.pop(_name_of(vmim), None)
        if not attempts:
            self._attempts.pop(owner, None)

    def _end_life(self, key: Key, life: _Life) -> None:
        del self._lives[key]
        if self._began is not None:
            self._vm_seconds += self._now - life.since
        for world in self._worlds:
            world.lose_vmi(life.vmi)


class _World:
    """One contender's world: what happened there, and what is counted of it."""

    def __init__(self, contender: Contender, attempts: Mapping[Key, Mapping[str, Vmim]]) -> None:
        self.store = Store(endings_kept=contender.policy.endings_kept)
        self._attempts = attempts
        self._policy = contender.policy
        self._stuck = contender.stuck
        self._requests: dict[str, _Request] = {}
        self._tallies: dict[str, _Tally] = {}
        self._open: dict[str, _Open] = {}
        self._look_at: Instant = math.inf
        self._began: Instant | None = None
        self._longest: list[tuple[Seconds, int, StuckEvacuation]] = []
        self._account = Account(
            contender=contender,
            allowed_over_time=Timeline(0.0),
            refused_over_time=Timeline(0.0),
            cooling_over_time=Timeline(0.0),
        )

    # Time

    def begin(self, now: Instant) -> None:
        """The first list has been read; what it told is where the story begins."""
        self._began = now
        account = self._account
        for timeline in _timelines(account):
            timeline.began = now
        for evidence in list(self.store.all_evidence()):
            self._assess(evidence.vmi, now)

    def pass_time(self, now: Instant) -> None:
        """The clock goes on: evacuations that it turns stuck are found at their own instants."""
        while self._look_at < now:
            at = self._look_at
            for uid, opened in sorted(self._open.items()):
                if opened.look_at <= at:
                    evidence = self.store.evidence(opened.vmi.namespace, opened.vmi.name)
                    self._look(uid, evidence, math.nextafter(at, math.inf), told_at=at)
            self._look_at = min((o.look_at for o in self._open.values()), default=math.inf)
        self.store.heard_at = now

    def close(self, now: Instant) -> Account:
        """The recording is over."""
        account = self._account
        for uid in list(self._tallies):
            self._retire(uid, now)
        for uid in list(self._open):
            self._end_evacuation(uid, None, now)
        for timeline in _timelines(account):
            timeline.extend(now)
        account.stuck.longest = [one for _, _, one in sorted(self._longest, reverse=True)]
        return account

    # What happens

    def take_vmi(self, vmi: Vmi, before: Vmi | None) -> None:
        """A VMI really said this, and `before` that."""
        now = self.store.heard_at
        if before is not None and vmi.evacuation_node not in ("", before.evacuation_node):
            self._ask(vmi, now)
        request = self._requests.get(vmi.uid)
        if request is not None:
            self._attribute(request, vmi, before)
            if vmi.evacuation_node != request.node:
                request.node = ""
            self._forget_kept_out(request, vmi)
        self._put_vmi(vmi, request)

    def take_vmim(self, vmim: Vmim, vmi: Vmi | None, *, is_new: bool) -> None:
        """A VMIM of that VMI really said this."""
        request = None if vmi is None else self._requests.get(vmi.uid)
        if request is not None and vmi is not None and is_new:
            if not _serves(vmim, request.node):
                self._give_back(vmi, request, vmim)
            elif vmim.priority is Priority.SYSTEM_CRITICAL and request.is_asked:
                self._take_back(vmi, request)
            elif request.reason is not None:
                request.kept_out.add(_name_of(vmim))
        if request is not None and request.keeps_out(_name_of(vmim)):
            return
        revision = self.store.revision
        self.store.put(vmim)
        if vmi is not None and self.store.revision != revision:
            self._assess(vmi, self.store.heard_at)

    def lose_vmim(self, vmi: Vmi) -> None:
        """A VMIM of this VMI is really gone (and taken from the store already)."""
        request = self._requests.get(vmi.uid)
        if request is not None:
            self._forget_kept_out(request, vmi)
        self._assess(vmi, self.store.heard_at)

    def lose_vmi(self, vmi: Vmi) -> None:
        """A VMI is really gone."""
        now = self.store.heard_at
        self.store.remove(Resource.VMIS, vmi.namespace, vmi.name)
        self._retire(vmi.uid, now)
        self._end_evacuation(vmi.uid, now, now)
        self._requests.pop(vmi.uid, None)

    # Evictions

    def _ask(self, vmi: Vmi, now: Instant) -> None:
        """An eviction was asked for: find what this policy would have said."""
        known = self._requests.pop(vmi.uid, None)
        evidence = self.store.evidence(vmi.namespace, vmi.name)
        if evidence is None:
            return
        # Two watches tell of the marker and of its first VMIM: either may come first.
        early = [v for v in evidence.vmims if not v.finished and _serves(v, vmi.evacuation_node)]
        request = self._requests[vmi.uid] = _Request(vmi.evacuation_node, now)
        if known is not None:
            request.former = known.former | known.kept_out
        if any(vmim.priority is Priority.SYSTEM_CRITICAL for vmim in early):
            request.is_asked = False
            self._account.others += 1
            return
        earlier = tuple(vmim for vmim in evidence.vmims if vmim not in early)
        just_before = replace(evidence, vmims=earlier, kept=None)
        request.reason = decide(just_before, self._policy, now).reason
        self._count_answer(request, 1)
        for vmim in early if request.reason is not None else ():
            request.kept_out.add(_name_of(vmim))
            self.store.remove(Resource.VMIMS, vmim.namespace, vmim.name)

    def _count_answer(self, request: _Request, times: int) -> None:
        account = self._account
        if request.reason is None:
            account.allowed += times
            account.allowed_over_time.add(request.at, times)
        else:
            account.refused[request.reason] = account.refused.get(request.reason, 0) + times
            account.refused_over_time.add(request.at, times)

    def _take_back(self, vmi: Vmi, request: _Request) -> None:
        """Somebody else than the descheduler asked, and they ask nobody: it happened."""
        self._count_answer(request, -1)
        self._account.others += 1
        request.is_asked, request.reason = False, None
        for name, vmim in self._attempts_of(vmi).items():
            if name in request.kept_out:
                self.store.put(vmim)
        request.kept_out.clear()
        self._put_vmi(vmi, request)

    def _attribute(self, request: _Request, vmi: Vmi, before: Vmi | None) -> None:
        """A migration that begins during a refused evacuation is its own, unless known better."""
        state = vmi.migration
        if not request.node or request.reason is None or state is None or not state.uid:
            return
        known = None if before is None else before.migration
        if known is not None and known.uid == state.uid:
            return
        owner = self._attempts_of(vmi).get(state.uid)
        if owner is None or _serves(owner, request.node):
            request.kept_out.add(state.uid)

    def _give_back(self, vmi: Vmi, request: _Request, vmim: Vmim) -> None:
        """A migration that was attributed before its VMIM was told may be somebody else's."""
        if vmim.uid in request.kept_out and vmim.trigger is not Trigger.EVACUATION:
            request.kept_out.discard(vmim.uid)
            self._put_vmi(vmi, request)

    def _forget_kept_out(self, request: _Request, vmi: Vmi) -> None:
        """What neither a VMIM nor the VMI tells of any more need not be kept out."""
        if request.kept_out or request.former:
            told = set(self._attempts_of(vmi))
            told.add("" if vmi.migration is None else vmi.migration.uid)
            request.kept_out &= told
            request.former &= told
        if not (request.node or request.kept_out or request.former):
            self._requests.pop(vmi.uid, None)

    def _attempts_of(self, vmi: Vmi) -> Mapping[str, Vmim]:
        """All its VMIMs that there really are, by what they are told apart by."""
        return self._attempts.get((vmi.namespace, vmi.name), {})

    def _put_vmi(self, vmi: Vmi, request: _Request | None) -> None:
        """Tell the world of a VMI what of it happened there."""
        known = self.store.evidence(vmi.namespace, vmi.name)
        before = None if known is None else known.vmi
        revision = self.store.revision
        self.store.put(vmi if request is None else _hide(vmi, before, request))
        if self.store.revision == revision:
            return
        self._count_migration(vmi.uid, before)
        self._assess(vmi, self.store.heard_at)

    # What is counted

    def _count_migration(self, uid: str, before: Vmi | None) -> None:
        tally = self._tallies.setdefault(uid, _Tally())
        now = None if before is None else self.store.evidence(before.namespace, before.name)
        if before is None or now is None or not _has_ended(before.migration, now.vmi.migration):
            return
        tally.migrations += 1
        self._account.migrations.ended += 1
        state = now.vmi.migration
        self._account.migrations.failed += state is not None and state.outcome is Outcome.FAILED

    def _assess(self, vmi: Vmi, now: Instant) -> None:
        """Something of this VMI has changed: see if it cools down or its evacuation is stuck."""
        if self._began is None:
            return
        evidence = self.store.evidence(vmi.namespace, vmi.name)
        if evidence is None:
            return
        self._measure(evidence, now)
        self._look(vmi.uid, evidence, now, told_at=now)

    def _measure(self, evidence: Evidence, now: Instant) -> None:
        """Since when and until when it cools down, worked out anew only where that can differ.

        Because most events of a VMI change nothing in it, and it is most of a replay's time.
        """
        tally = self._tallies.setdefault(evidence.vmi.uid, _Tally())
        state = evidence.vmi.migration
        read = (state, evidence.history.revision)
        is_emptied = state is not None and state.start is None and not state.ended
        if read == tally.read and not is_emptied:
            return
        self._cool(tally, now)
        tally.since = tally.until = now
        tally.read = read
        if state is None or state.running:
            return
        cooldown = measure_cooldown(evidence, self._policy, now)
        if cooldown is None or not cooldown.blocks:
            return
        tally.until = max(cooldown.released_at, now)
        limit = self._policy.max_migration_cooldown
        tally.at_cap = tally.at_cap or (limit > 0 and cooldown.effective >= limit)

    def _cool(self, tally: _Tally, now: Instant) -> None:
        """Count how long it has cooled down until now."""
        until = min(tally.until, now)
        if until > tally.since:
            self._account.cooldown_seconds += until - tally.since
            self._account.cooling_over_time.spread(tally.since, until)

    def _retire(self, uid: str, now: Instant) -> None:
        """A VMI is gone, or the recording over: what is counted of it is complete."""
        tally = self._tallies.pop(uid, None)
        if tally is None:
            return
        self._cool(tally, now)
        self._account.vms_at_cap += tally.at_cap
        if tally.migrations:
            self._account.migrations.per_vm.add(tally.migrations)

    def _look(self, uid: str, evidence: Evidence | None, now: Instant, *, told_at: Instant) -> None:
        """Diagnose one VMI's evacuation at `now`; what is found is told as of `told_at`."""
        found = None if evidence is None else diagnose(evidence, self._stuck, None, now)
        opened = self._open.get(uid)
        if opened is not None and (found is None or found.node != opened.node):
            self._end_evacuation(uid, told_at, told_at)
            opened = None
        if found is None or evidence is None:
            return
        if opened is None:
            opened = self._open[uid] = _Open(evidence.vmi, found.node, found.requested_at)
        opened.requested_at = found.requested_at
        fires_at = math.inf if opened.stuck_at is None else opened.stuck_at + ALERT_FOR
        if found.stuck and (opened.stuck_at is None or opened.look_at <= fires_at < now):
            opened.stuck_at = told_at if opened.stuck_at is None else opened.stuck_at
            opened.found = diagnose(evidence, self._stuck, self.store.load(), now)
        opened.look_at = min(
            (at for at in self._turns(evidence, found, opened.stuck_at) if at >= now),
            default=math.inf,
        )
        self._look_at = min(self._look_at, opened.look_at)

    def _turns(
        self, evidence: Evidence, found: Diagnosis, stuck_at: Instant | None
    ) -> Iterator[Instant]:
        """The instants after which the clock alone makes an evacuation stuck, or the alert fire."""
        if stuck_at is not None:
            yield stuck_at + ALERT_FOR
            return
        stuck, state = self._stuck, evidence.vmi.migration
        yield found.requested_at + stuck.after
        if stuck.external is not None:
            yield found.requested_at + stuck.external
        for instant in () if state is None else (state.start, state.end):
            if instant is not None:
                yield instant + stuck.migration_timeout

    def _end_evacuation(self, uid: str, ended_at: Instant | None, now: Instant) -> None:
        """An evacuation is over, or (None) the recording."""
        opened = self._open.pop(uid, None)
        if opened is None or opened.stuck_at is None or opened.found is None:
            return
        found, stuck = opened.found, self._account.stuck
        fires_at = opened.stuck_at + ALERT_FOR
        alerted_at = fires_at if now >= fires_at else None
        stuck.found += 1
        stuck.by_state[found.state] = stuck.by_state.get(found.state, 0) + 1
        stuck.open_at_end += ended_at is None
        if alerted_at is not None:
            stuck.alerted += 1
            stuck.minutes_to_alert.add(int((alerted_at - opened.requested_at) // 60))
            stuck.minutes_alerting.add(int((now - alerted_at) // 60))
        told = StuckEvacuation(
            namespace=opened.vmi.namespace,
            name=opened.vmi.name,
            node=opened.node,
            source=found.source,
            requested_at=opened.requested_at,
            stuck_at=opened.stuck_at,
            alerted_at=alerted_at,
            ended_at=ended_at,
            state=found.state,
            causes=found.stuck_by,
        )
        entry = (now - opened.stuck_at, -stuck.found, told)
        (heappush if len(self._longest) < STUCK_TOLD else heappushpop)(self._longest, entry)


def play(events: Iterable[Recorded], contenders: Iterable[Contender]) -> Comparison:
    """What each contender would have done with these events."""
    replay = Replay(contenders)
    for event in events:
        replay.take(event)
    return replay.finish()


def _timelines(account: Account) -> tuple[Timeline, ...]:
    return (
        account.allowed_over_time,
        account.refused_over_time,
        account.cooling_over_time,
    )


def _serves(vmim: Vmim, node: str) -> bool:
    """Whether a VMIM was made to evacuate that node."""
    return vmim.trigger is Trigger.EVACUATION and vmim.evacuates == node != ""


def _name_of(vmim: Vmim) -> str:
    return vmim.uid or vmim.name


def _has_ended(before: MigrationState | None, state: MigrationState | None) -> bool:
    """Whether it is the end of a migration that is new in this state."""
    if state is None or not state.ended:
        return False
    is_same = before is not None and (before.uid, before.start) == (state.uid, state.start)
    return not (is_same and before is not None and before.ended)


def _hide(vmi: Vmi, before: Vmi | None, request: _Request) -> Vmi:
    """The VMI without what was refused: the marker, and the migrations that followed from it."""
    if request.node and request.reason is not None:
        vmi = replace(
            vmi, evacuation_node="", eviction_requested_at=None, evicted_by_descheduler=False
        )
    if vmi.migration is not None and request.keeps_out(vmi.migration.uid):
        vmi = replace(
            vmi,
            migration=None if before is None else before.migration,
            other_uids=() if before is None else before.other_uids,
        )
    return vmi
