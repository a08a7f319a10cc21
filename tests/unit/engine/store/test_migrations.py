"""The index of VMIMs: deleted VMIMs wait until their VMI is read."""

import pytest

from exporter.engine.facts.model import Vmim
from exporter.engine.store.migrations import VmimIndex
from exporter.engine.store.vmi_record import VmiRecord
from tests.support.builders import a_vmi, an_ended_vmim


def put_and_remove(vmims: VmimIndex, vmim: Vmim, *, proven: bool = False) -> None:
    """Add and delete a VMIM."""
    binding = vmims.put(vmim)
    binding.proven = proven
    vmims.remove_binding(binding)


def waiting(vmims: VmimIndex, name: str = "db1") -> list[str]:
    """The names of the deleted VMIMs that are bound to a new VMI of this name."""
    return [binding.vmim.name for binding in vmims.bind_all(VmiRecord(a_vmi(name=name)))]


@pytest.mark.parametrize(
    ("handed_off", "proven", "waits"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
def test_which_deleted_vmims_wait(*, handed_off: bool, proven: bool, waits: bool) -> None:
    """A deleted VMIM waits if it was handed off and is not yet proven to belong to a VMI."""
    vmims = VmimIndex(keep=8)
    put_and_remove(vmims, an_ended_vmim(handed_off=handed_off), proven=proven)
    assert waiting(vmims) == (["mig-1"] if waits else [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("mig", "m1"), ("mig", "m2"), id="one-name-two-uids"),
        pytest.param(("mig-1", ""), ("mig-2", ""), id="two-names-no-uid"),
    ],
)
def test_each_deleted_vmim_waits(first: tuple[str, str], second: tuple[str, str]) -> None:
    """Deleted VMIMs are identified by UID, else by name."""
    vmims = VmimIndex(keep=8)
    for name, uid in (first, second):
        put_and_remove(vmims, an_ended_vmim(name=name, uid=uid))
    assert waiting(vmims) == [first[0], second[0]]


def test_vmims_wait_for_a_thousand_vmis() -> None:
    """Deleted VMIMs of at most a thousand VMIs wait; the oldest are dropped."""
    vmims = VmimIndex(keep=8)
    for number in range(1_001):
        put_and_remove(vmims, an_ended_vmim(vmi_name=f"vm-{number}"))
    assert waiting(vmims, "vm-0") == []
    assert waiting(vmims, "vm-1") == ["mig-1"]
