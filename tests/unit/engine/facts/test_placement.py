"""Which nodes may run a pod by its selector, its required affinity and its tolerations."""

import pytest

from exporter.engine.facts.placement import HOSTNAME, Placement, Requirement, Term, Toleration


LABELS = (("zone", "a"), ("cpus", "16"))


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        (Requirement("zone", "In", ("a", "b")), True),
        (Requirement("zone", "In", ("b",)), False),
        (Requirement("zone", "NotIn", ("b",)), True),
        (Requirement("rack", "NotIn", ("b",)), True),
        (Requirement("zone", "Exists", ()), True),
        (Requirement("rack", "Exists", ()), False),
        (Requirement("rack", "DoesNotExist", ()), True),
        (Requirement("cpus", "Gt", ("8",)), True),
        (Requirement("cpus", "Gt", ("16",)), False),
        (Requirement("cpus", "Lt", ("32",)), True),
        (Requirement("cpus", "Lt", ("16",)), False),
        (Requirement("zone", "Lt", ("32",)), False),
        (Requirement("rack", "Gt", ("1",)), False),
        (Requirement("zone", "Near", ("a",)), False),
    ],
)
def test_a_requirement(requirement: Requirement, *, met: bool) -> None:
    """Each operator of a node affinity means what it means to the scheduler."""
    assert requirement.is_met(dict(LABELS)) is met
    placement = Placement(terms=(Term((requirement,), ()),))
    assert placement.matches("n1", LABELS) is met


def test_one_term_is_enough() -> None:
    """One of the terms must match, with labels and fields; an empty term matches nothing."""
    zone_b = Term((Requirement("zone", "In", ("b",)),), ())
    named = Term((), (Requirement("metadata.name", "In", ("n1",)),))
    assert Placement(terms=(zone_b, named)).matches("n1", LABELS)
    assert not Placement(terms=(zone_b, named)).matches("n2", LABELS)
    assert not Placement(terms=(Term((), ()),)).matches("n1", LABELS)
    assert not Placement(terms=()).matches("n1", LABELS)


def test_the_selector_needs_every_label() -> None:
    """A node selector matches a node with all of its labels."""
    assert Placement(selector=(("zone", "a"),)).matches("n1", LABELS)
    assert not Placement(selector=(("zone", "a"), ("rack", "1"))).matches("n1", LABELS)


def test_the_only_host_that_a_selector_allows() -> None:
    """A selector for a hostname binds the pod to it."""
    assert Placement(selector=((HOSTNAME, "n1"), ("zone", "a"))).hostname == "n1"
    assert Placement(selector=(("zone", "a"),)).hostname == ""


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        (Toleration("gpu", "Equal", "yes", "NoSchedule"), True),
        (Toleration("gpu", "", "yes", ""), True),
        (Toleration("gpu", "Equal", "no", "NoSchedule"), False),
        (Toleration("gpu", "Exists", "", "NoExecute"), False),
        (Toleration("cpu", "Exists", "", ""), False),
        (Toleration("", "Exists", "", ""), True),
        (Toleration("", "Equal", "yes", ""), False),
    ],
)
def test_a_toleration(toleration: Toleration, *, covers: bool) -> None:
    """A toleration covers a taint by key, value and effect; without a key, only by Exists."""
    placement = Placement(tolerations=(toleration,))
    assert placement.tolerates("gpu", "yes", "NoSchedule") is covers


def test_every_pod_tolerates_a_silent_node_for_a_while() -> None:
    """Kubernetes adds two tolerations with the effect NoExecute to every pod."""
    assert Placement().tolerates("node.kubernetes.io/unreachable", "", "NoExecute")
    assert not Placement().tolerates("node.kubernetes.io/unreachable", "", "NoSchedule")
