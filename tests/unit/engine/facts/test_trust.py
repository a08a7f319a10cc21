"""What may be believed of each resource."""

import pytest

from exporter.engine.facts.model import Resource
from exporter.engine.facts.trust import NamespaceTrust, Trust
from exporter.settings import KubeSettings
from tests.support.builders import NOW


VMIMS, PODS = Resource.VMIMS, Resource.PODS
BLIND, SILENT = NamespaceTrust(frozenset({VMIMS})), NamespaceTrust(dead=frozenset({VMIMS}))


@pytest.mark.parametrize(
    ("trust", "sees", "believes"),
    [
        pytest.param(NamespaceTrust(), True, True, id="all"),
        pytest.param(BLIND, False, False, id="unseen"),
        pytest.param(SILENT, True, False, id="dead"),
    ],
)
def test_of_a_namespace(trust: NamespaceTrust, *, sees: bool, believes: bool) -> None:
    """The last objects of a dead resource are seen, but not believed."""
    assert (trust.sees(VMIMS), trust.believes(VMIMS)) == (sees, believes)
    assert (trust.sees(PODS), trust.believes(PODS)) == (True, True)


def test_objects_are_believed_for_as_long_as_the_settings_say() -> None:
    """Without settings, an object that cannot be read is believed for their default."""
    assert NamespaceTrust().dead_after == KubeSettings().dead_after == 600.0


def test_of_the_cluster() -> None:
    """The cluster is believed if each watched namespace is; it is all seen if all are watched."""
    cluster, some = Trust(BLIND), Trust(in_namespace={"a": SILENT, "b": NamespaceTrust()})
    assert [cluster.of("a"), some.of("a"), some.of("c")] == [BLIND, SILENT, NamespaceTrust()]
    assert [Trust().sees_all(VMIMS, PODS), cluster.sees_all(PODS), cluster.sees_all(VMIMS)] == [
        True,
        True,
        False,
    ]
    assert not some.sees_all(PODS)
    assert [some.believes(VMIMS), some.believes(PODS), cluster.believes(VMIMS, PODS)] == [0, 1, 0]
    assert [cluster.has_dead, some.has_dead, Trust(SILENT).has_dead] == [False, True, True]


def test_the_contacts_of_a_namespace() -> None:
    """A namespace has the contacts of its own watches, or else those of the whole cluster."""
    own, everywhere = {VMIMS: NOW}, {PODS: NOW}
    trust = Trust(contacts_everywhere=everywhere, contacts_in_namespace={"a": own})
    assert [trust.contacts_of("a"), trust.contacts_of("b")] == [own, everywhere]


def test_the_limits_leave_out_contacts() -> None:
    """Contacts, nodes and budgets change no verdict, so they are not in the limits."""
    quiet = NamespaceTrust(frozenset({Resource.NODES, Resource.BUDGETS}))
    seen = Trust(quiet, {"a": quiet}, {VMIMS: NOW}, {"a": {VMIMS: NOW}})
    assert seen.limits == Trust(in_namespace={"a": NamespaceTrust()}).limits
    assert Trust(BLIND).limits != Trust(SILENT).limits != Trust().limits
    assert Trust(in_namespace={"a": BLIND}).limits != Trust(in_namespace={"b": BLIND}).limits
