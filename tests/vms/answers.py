"""The exporter's answers about VMs and nodes."""

from tests.e2e.asking import Caller
from tests.e2e.cluster import Object
from tests.vms.kubevirt import SPACE


def ask_vmi(caller: Caller, name: str) -> Object:
    """The explanation of one VM."""
    status, answer = caller.ask("GET", f"/v1/vmis/{SPACE}/{name}")
    assert status == 200, answer
    document: Object = answer
    return document


def ask_evacuation(caller: Caller, name: str) -> Object:
    """The evacuation of a VM; empty if there is none."""
    evacuation: Object = ask_vmi(caller, name)["evacuation"] or {}
    return evacuation


def ask_node(caller: Caller, node: str) -> Object:
    """The answer about a node: the forecast for a drain, and the progress of a running drain."""
    status, answer = caller.ask("GET", f"/v1/nodes/{node}")
    assert status == 200, answer
    document: Object = answer
    return document
