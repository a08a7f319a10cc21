"""Recordings are read as they were written, and contain no secrets."""

import gzip
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.engine.facts.model import (
    CLUSTER_RESOURCES,
    EndReason,
    Fact,
    KubeVirtSettings,
    MigrationLimits,
    Outcome,
    Resource,
    Vmi,
)
from exporter.kube.objects.kubevirt import parse_object
from exporter.whatif import recording
from exporter.whatif.recording import CannotReplay, Faults, Kind, Recorded
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    Json,
    a_pod,
    a_pod_json,
    a_running_state,
    a_state,
    a_vmi,
    a_vmi_json,
    a_vmim,
    a_vmim_json,
    an_ended_vmim,
    rfc3339,
)
from tests.support.replaying import read_file


SETTINGS = KubeVirtSettings(MigrationLimits(9, 3), "LiveMigrate", updating=True)
PASSWORD = "hunter2-and-more"


def read(*lines: bytes) -> tuple[list[Recorded], Faults]:
    """The events of these lines, and their faults."""
    faults = Faults()
    return list(recording.read(lines, faults)), faults


def line(kind: str, made: Json, **others: object) -> bytes:
    """A line as kubectl writes it."""
    return json.dumps({"type": kind, "object": made} | others).encode()


def fact_line(resource: str, kind: str, fact: str = "{}") -> bytes:
    """A line with a fact."""
    at = rfc3339(NOW)
    return f'{{"at":"{at}","type":"{kind}","resource":"{resource}","fact":{fact}}}'.encode()


def a_recording() -> bytes:
    """A recording of four lines."""
    names = {"namespace": NAMESPACE, "name": NAME, "uid": UID}
    return b"".join(
        [
            recording.write_header(),
            recording.write_event(NOW, Kind.ADDED, Resource.VMIS, fact=a_vmi()),
            recording.write_event(NOW, Kind.SYNCED, Resource.VMIS),
            recording.write_event(
                NOW + 0.25, Kind.DELETED, Resource.VMIS, object={"metadata": names}
            ),
        ]
    )


@pytest.mark.parametrize(
    ("resource", "fact"),
    [
        (Resource.VMIS, a_vmi(migration=a_state(), evacuation_node="n1", migratable=True)),
        (Resource.VMIS, a_vmi(migration=a_running_state(time_limit=450.0))),
        (Resource.VMIMS, a_vmim()),
        (Resource.VMIMS, an_ended_vmim()),
        (Resource.PODS, a_pod(eviction_in_progress=True)),
        (Resource.KUBEVIRTS, SETTINGS),
    ],
)
def test_a_fact_is_read_as_it_was_written(resource: Resource, fact: Fact) -> None:
    """A fact is read as it was written, with time and type."""
    written = recording.write_event(NOW + 0.125, Kind.MODIFIED, resource, fact=fact)

    assert read(written) == ([Recorded(NOW + 0.125, Kind.MODIFIED, resource, fact)], Faults())


def test_why_a_migration_failed_is_read_as_it_was_written() -> None:
    """The reason of a failure is read as written; without a reason it is OTHER."""
    failed = an_ended_vmim(phase="Failed", outcome=Outcome.FAILED)
    for reason, more in ((EndReason.LIBVIRT, {"reason": "libvirt"}), (EndReason.OTHER, {})):
        written = recording.write_event(NOW, Kind.MODIFIED, Resource.VMIMS, fact=failed, **more)
        (event,), _ = read(written)
        assert event.reason is reason


def test_a_recording_of_an_older_version_is_read() -> None:
    """Version 1 has objects of the cluster instead of facts."""
    made = a_vmi_json()
    made["metadata"]["labels"] = {"tier": "gold"}
    old = line("MODIFIED", made, at=rfc3339(NOW), resource="virtualmachineinstances")
    (event,), faults = read(recording.write_header().replace(b":2}", b":1}"), old)

    assert not faults.count
    assert (event.at, event.kind, event.resource) == (NOW, Kind.MODIFIED, Resource.VMIS)
    assert event.fact == parse_object(Resource.VMIS, msgspec.json.encode(made)).fact
    assert event.traits is not None
    assert event.traits.read_labels() == {"tier": "gold"}


def test_deletions_and_notes_are_read_as_they_were_written() -> None:
    """Deletions and SYNCED lines are read as they were written."""
    events, faults = read_file(a_recording())

    assert [event.kind for event in events] == [Kind.ADDED, Kind.SYNCED, Kind.DELETED]
    assert events[1].resource is Resource.VMIS
    assert (events[2].namespace, events[2].name, events[2].uid) == (NAMESPACE, NAME, UID)
    assert not faults.count


def test_no_secret_of_a_spec_is_ever_written() -> None:
    """A password in an object is not written to the recording."""
    spec = {
        "evictionStrategy": "LiveMigrate",
        "volumes": [{"cloudInitNoCloud": {"userData": f"password: {PASSWORD}"}}],
        "accessCredentials": [{"userPassword": PASSWORD}],
    }
    notes = {
        "kubevirt.io/last-modified-by": PASSWORD,
        "kubectl.kubernetes.io/last-applied-configuration": PASSWORD,
        "kubevirt.io/eviction-source": PASSWORD,
    }
    vmi = a_vmi_json()
    vmi["spec"] = spec
    vmi["metadata"]["annotations"] = notes
    vmi["metadata"]["labels"] = {"token": PASSWORD}
    vmi["status"]["migrationState"] = {"failureReason": PASSWORD, "startTimestamp": PASSWORD}
    vmim = a_vmim_json()
    vmim["metadata"]["annotations"] = notes
    vmim["spec"]["addedNodeSelector"] = {"secret": PASSWORD}
    pod = a_pod_json()
    pod["spec"]["containers"] = [{"env": [{"name": "PASSWORD", "value": PASSWORD}]}]
    pod["metadata"]["annotations"] = notes
    pod["metadata"]["labels"]["token"] = PASSWORD
    for resource, made in zip(CLUSTER_RESOURCES, (vmi, vmim, pod), strict=False):
        raw = msgspec.json.encode(made)
        fact = parse_object(resource, raw).fact
        written = recording.write_event(NOW, Kind.ADDED, resource, fact=recording.strip(fact))
        assert PASSWORD.encode() in raw
        assert PASSWORD.encode() not in written


def test_kubectl_s_lines_are_read() -> None:
    """In kubectl's lines the event's time is the latest time in the object."""
    made = a_vmi_json(kind="VirtualMachineInstance")
    made["status"]["conditions"] = [
        {"type": "EvictionRequested", "status": "True", "lastTransitionTime": rfc3339(NOW - 5)}
    ]
    events, faults = read(line("ADDED", made), line("DELETED", made))

    assert not faults.count
    assert [event.at for event in events] == [NOW - 5, NOW - 5]
    assert isinstance(events[0].fact, Vmi)
    assert (events[1].kind, events[1].name) == (Kind.DELETED, NAME)


def test_an_annotation_has_no_instant() -> None:
    """A date in an annotation does not count as the time of an event."""
    made = a_vmi_json(kind="VirtualMachineInstance")
    made["metadata"]["annotations"] = {"expires": rfc3339(NOW + 1e8)}
    made["metadata"]["labels"] = {"until": rfc3339(NOW + 1e8)}
    made["metadata"]["creationTimestamp"] = rfc3339(NOW)
    events, _ = read(line("ADDED", made))

    assert [event.at for event in events] == [NOW]


def test_a_deletion_is_before_its_grace_period() -> None:
    """The time of a deletion is the time of its request, before the grace period."""
    made = a_pod_json(kind="Pod")
    made["metadata"] |= {"deletionTimestamp": rfc3339(NOW), "deletionGracePeriodSeconds": 30}
    events, _ = read(line("MODIFIED", made))

    assert [event.at for event in events] == [NOW - 30]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "not an event"),
        (b"[]", "not an event"),
        (b'{"type":"ADDED","at":"2026-01-05T10:00:00Z"}', "unknown resource ''"),
        (line("ADDED", {"kind": "Secret"}, at=rfc3339(NOW)), "unknown resource 'Secret'"),
        (line("ADDED", {"kind": "Pod", "metadata": {}}), "no instant"),
        (line("ADDED", a_vmi_json(), resource="pods", at="soon"), "no instant"),
        (line("LATER", a_vmi_json(), resource="pods", at=rfc3339(NOW)), "unknown watch event"),
        (b"", "empty"),
        (fact_line("vmis", "ADDED"), "unknown resource 'vmis'"),
        (fact_line("pods", "DELETED"), "unknown watch event 'DELETED' of a fact"),
        (fact_line("pods", "ADDED", '{"namespace": "a"}'), "not an event"),
        (fact_line("pods", "ADDED", "[" * 100_000), "not an event"),
    ],
)
def test_a_bad_line_is_reported_and_skipped(bad: bytes, why: str) -> None:
    """A bad line is reported with its number, and the other lines are read."""
    good = recording.write_event(NOW, Kind.SYNCED, Resource.VMIS)
    events, faults = read(good, bad, good)

    assert len(events) == 2
    assert faults.count == 1
    assert faults.messages[0].startswith(f"line 2: {why}")


def test_the_messages_about_bad_lines_are_bounded() -> None:
    """All bad lines are counted, but only the first ones are described."""
    _, faults = read(recording.write_header(), *[b"{"] * 1000)

    assert faults.count == 1000
    assert len(faults.messages) == recording.MAX_MESSAGES


@pytest.mark.parametrize(
    "header",
    [b'{"format":"somebody/else","version":1}', b'{"format":"%s","version":3}', b'{"items":[]}'],
)
def test_another_format_is_refused(header: bytes) -> None:
    """Another format, a later version and other JSON are errors."""
    with pytest.raises(CannotReplay):
        read(header.replace(b"%s", recording.FORMAT.encode()))


def test_a_compressed_file_is_read_as_a_plain_one() -> None:
    """A compressed file has the same events as the uncompressed file."""
    assert read_file(gzip.compress(a_recording())) == read_file(a_recording())


def test_a_gzip_may_have_several_members() -> None:
    """A gzip file with several members is read as one recording."""
    first, two = a_recording()[:100], a_recording()[100:]

    assert read_file(gzip.compress(first) + gzip.compress(two)) == read_file(a_recording())


@given(st.integers(min_value=1, max_value=len(a_recording())), st.booleans())
def test_a_truncated_file_is_read_to_its_last_complete_line(length: int, zipped: bool) -> None:
    """A truncated file is read to its last complete line, and reported."""
    body = a_recording()[:length]
    events, faults = read_file(gzip.compress(body)[:-8] if zipped else body)
    _, _, tail = body.rpartition(b"\n")

    assert faults.count == 0
    assert faults.truncated is (zipped or tail not in (b"", *a_recording().splitlines()))
    assert len(events) in {max(body.count(b"\n") - 1, 0), body.count(b"\n")}


def test_an_endless_line_is_skipped_in_bounded_memory() -> None:
    """A line longer than any object counts as one fault."""
    endless = b"x" * 17 * 2**20
    events, faults = read_file(
        b"\n".join([recording.write_header().strip(), endless, a_recording().split(b"\n")[1], b""])
    )

    assert len(events) == 1
    assert faults.messages == ["line 2: empty, or too long for an object"]
