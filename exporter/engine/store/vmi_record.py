"""What the store keeps per VMI, and the index of all VMIs."""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct, field

from exporter.engine.facts.evidence import Marker, SavedVmi
from exporter.engine.facts.history import History, is_end_key
from exporter.engine.facts.mappings import Table, add_to_count
from exporter.engine.facts.model import Instant, NodeMobility, Pod, Vmi
from exporter.engine.store.requesters import Source


class VmiRecord(Struct, gc=False):
    """A VMI with everything known about its migrations.

    `proofs` are the migration UIDs from its `migrationState` and the history file, newest last.
    `seen_at` is when the VMI was last read; `changed_at` and `handed_off_at` are those of
    `Evidence`. `source` is who requested the evacuation of `marker`. `saved` is a marker from the
    history file, until it is known whether that evacuation still goes on. `cancelled_at` is when
    the VMI's `evacuationNodeName` was last cleared.
    """

    vmi: Vmi
    history: History = field(default_factory=History)
    proofs: tuple[str, ...] = ()
    marker: Marker | None = None
    source: Source = Source.UNKNOWN
    saved: Marker | None = None
    seen_at: Instant | None = None
    changed_at: Instant = 0.0
    handed_off_at: Instant = 0.0
    cancelled_at: Instant | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.vmi.namespace, self.vmi.name

    def prove(self, uids: Iterable[str], *, keep: int) -> None:
        """Add migration UIDs that belong to this VMI; the newest `keep` are kept."""
        new = dict.fromkeys(uids)
        known = [uid for uid in self.proofs if uid not in new]
        self.proofs = (*known, *new)[-keep:]

    def save(self) -> SavedVmi | None:
        """What to write about this VMI into the history file; None if there is nothing."""
        migrations, marker = self.history.records(), self.marker or self.saved
        if not migrations and marker is None:
            return None
        vmi = self.vmi
        return SavedVmi(uid=vmi.uid, namespace=vmi.namespace, migrations=migrations, marker=marker)

    def restore(self, saved: SavedVmi, *, keep: int) -> None:
        """Add what the history file has of this VMI, which is new."""
        self.prove((key for key in saved.migrations if not is_end_key(key)), keep=keep)
        for key, migration in saved.migrations.items():
            self.history.put("" if is_end_key(key) else key, migration, keep=keep)
        self.saved = saved.marker


class VmiIndex:
    """All VMIs by key and by UID. `mobilities` counts the VMIs that have not ended, by node."""

    def __init__(self) -> None:
        self.by_key = Table[tuple[str, str], VmiRecord]()
        self.by_uid: dict[str, VmiRecord] = {}
        self.mobilities: Counter[NodeMobility] = Counter()

    def add(self, vmi: Vmi) -> VmiRecord:
        """Add a VMI."""
        record = VmiRecord(vmi)
        self.by_key[record.key] = self.by_uid[vmi.uid] = record
        self._count(vmi, 1)
        return record

    def update(self, record: VmiRecord, vmi: Vmi) -> None:
        """Replace the VMI of a record by its changed version."""
        self._count(record.vmi, -1)
        self._count(vmi, 1)
        record.vmi = vmi

    def remove(self, record: VmiRecord) -> None:
        """Remove a VMI that is in the index."""
        del self.by_key[record.key]
        self.by_uid.pop(record.vmi.uid, None)
        self._count(record.vmi, -1)

    def on_node(self, node: str) -> list[VmiRecord]:
        """The VMIs on a node, ended ones included."""
        return [record for record in self.by_key.values() if record.vmi.node == node]

    def count_by_node(self) -> Counter[str]:
        """The number of VMIs on each node, without VMIs that have ended."""
        nodes: Counter[str] = Counter()
        for (node, _), vmis in self.mobilities.items():
            nodes[node] += vmis
        return nodes

    def find_owner(self, pod: Pod) -> VmiRecord | None:
        """The VMI of a pod; only a VMI in the pod's own namespace counts."""
        record = self.by_uid.get(pod.vmi_uid)
        return None if record is None or record.vmi.namespace != pod.namespace else record

    def _count(self, vmi: Vmi, vmis: int) -> None:
        if not vmi.finished:
            add_to_count(self.mobilities, (vmi.node, vmi.mobility), vmis)
