"""What the history file keeps of a VMI, and gives back."""

from exporter.engine.facts.evidence import Marker
from exporter.engine.store.vmi_record import VmiRecord
from tests.support.builders import KEEP, NOW, a_migration, a_vmi


def test_what_is_saved_is_restored() -> None:
    """A process that starts again knows the migrations, and which UIDs are the VMI's."""
    record, again = VmiRecord(a_vmi()), VmiRecord(a_vmi())
    record.history.put("m0", a_migration(), keep=KEEP)
    record.history.put("", a_migration(start=NOW - 900.0, end=NOW - 800.0), keep=KEEP)
    saved = record.save()
    assert saved is not None
    again.restore(saved, keep=KEEP)

    assert again.history.records() == record.history.records()
    assert again.proofs == ("m0",)


def test_an_evacuation_is_saved_before_it_is_seen_again() -> None:
    """What the file says of an evacuation stays in it until the VMI's nodes have been read."""
    marker = Marker(node="n1", requested_at=NOW - 100.0)
    seen, awaited = VmiRecord(a_vmi(), marker=marker), VmiRecord(a_vmi(), saved=marker)

    for record in (seen, awaited):
        saved = record.save()
        assert saved is not None
        assert saved.marker is marker
    assert VmiRecord(a_vmi()).save() is None
