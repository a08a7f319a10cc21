"""What the store keeps per VMI."""

from collections.abc import Iterable

from msgspec import Struct, field

from exporter.engine.evidence import Marker
from exporter.engine.history import History
from exporter.engine.model import Instant, Vmi


class VmiRecord(Struct, gc=False):
    """A VMI with everything known about its migrations.

    `proofs` are the migration UIDs seen in its `migrationState`, newest last. `seen_at` is when
    the VMI was last read; `changed_at` and `handed_off_at` as in `Evidence`.
    """

    vmi: Vmi
    history: History = field(default_factory=History)
    proofs: tuple[str, ...] = ()
    marker: Marker | None = None
    seen_at: Instant | None = None
    changed_at: Instant = 0.0
    handed_off_at: Instant = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.vmi.namespace, self.vmi.name

    def prove(self, uids: Iterable[str], *, keep: int) -> None:
        """Add migration UIDs that belong to this VMI; the newest `keep` are kept."""
        proofs = dict.fromkeys(self.proofs)
        for uid in uids:
            proofs.pop(uid, None)
            proofs[uid] = None
        self.proofs = tuple(proofs)[-keep:]
