"""One migration that has ended: its phases and nodes, and why it failed (an `EndReason`).

KubeVirt writes the reason of a failure as free text, or not at all. A VMIM that fails before the
hand-off to the target pod has no text. Then the reason comes from the target pod, or from the
condition that delayed the VMIM. Sources: `virt-launcher` (`live-migration-source.go`),
`migration.go`, recordings of 1.8.4.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from exporter.engine.facts.history import complete_failure
from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import (
    EndReason,
    Instant,
    Outcome,
    Seconds,
    Vmi,
    Vmim,
    Why,
    WhySource,
)
from exporter.engine.facts.states import State


IMAGE_WORDS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
    }
)
"""The kubelet's reasons for a container whose image cannot be used."""
FAILURE_TEXTS = (
    ("stuck for", EndReason.TIMEOUT_PROGRESS),
    ("not completed after", EndReason.TIMEOUT_COMPLETION),
    ("has been aborted", EndReason.TIMEOUT_COMPLETION),
    ("aborted", EndReason.ABORTED),
    ("virerror", EndReason.LIBVIRT),
    ("target pod is down", EndReason.TARGET_LOST),
)
"""Parts of KubeVirt's `failureReason` in lower case; the first that is found counts.

KubeVirt 1.9 writes "has been aborted" for a migration that somebody cancels, that takes too long or
that makes no progress.
"""


class EndedMigration(Struct, frozen=True, kw_only=True):
    """One migration that has ended, as its VMIM says.

    `phase` is the last phase before the final one. `phases` has the seconds in each phase, in
    order. `message` is KubeVirt's own text. `source_node` and `target_node` are "" if unknown.
    """

    vmim: Vmim
    source_node: str = ""
    target_node: str = ""
    mode: str = ""
    message: str = ""
    phases: tuple[tuple[str, Seconds], ...] = ()
    has_state: bool = False
    """KubeVirt has copied the VMI's `migrationState`, which it does after the final phase."""

    @property
    def is_whole(self) -> bool:
        """Whether KubeVirt writes nothing more to its VMIM."""
        return self.has_state or not self.vmim.handed_off

    @property
    def phase(self) -> str:
        """The last phase before the final one; "" if there was none."""
        return self.phases[-1][0] if self.phases else ""

    @property
    def duration(self) -> Seconds | None:
        """The time from the VMIM's creation to its final phase; None if either is unknown."""
        if self.vmim.created is None or self.vmim.finished_at is None:
            return None
        return max(0.0, self.vmim.finished_at - self.vmim.created)


def find_reason(ended: EndedMigration, vmi: Vmi | None, reasons: Iterable[Why]) -> EndReason:
    """Why a migration failed; `NONE` if it did not fail.

    `vmi` is its VMI, if that still exists; `reasons` are those of its target pod.
    """
    vmim = ended.vmim
    if vmim.outcome is not Outcome.FAILED:
        return EndReason.NONE
    if vmim.handed_off:
        failure = classify_failure(ended.mode, ended.message, aborted=vmim.aborted)
        source_lost = vmi is not None and vmi.finished
        return complete_failure(failure, vmim.start, vmim.end, source_lost=source_lost)
    causes = _list_causes(ended, vmi, [*reasons])
    return next((reason for applies, reason in causes if applies), EndReason.OTHER)


def classify_text(message: str) -> EndReason:
    """What KubeVirt's own text says of a failure; `OTHER` if it says nothing known."""
    text = message.lower()
    return next((reason for part, reason in FAILURE_TEXTS if part in text), EndReason.OTHER)


def classify_failure(mode: str, message: str, *, aborted: bool) -> EndReason:
    """Why a migration failed after its hand-off, as far as KubeVirt says; else `OTHER`."""
    if mode == "PostCopy":
        return EndReason.POST_COPY_LOST
    return EndReason.ABORTED if aborted else classify_text(message)


def _list_causes(
    ended: EndedMigration, vmi: Vmi | None, reasons: list[Why]
) -> Iterator[tuple[bool, EndReason]]:
    """The possible reasons without a hand-off, and whether each applies; the first counts.

    Problems of image, scheduling and quota come before an abort.
    """
    vmim = ended.vmim
    pod = {why.reason for why in reasons if why.source is WhySource.TARGET_CONTAINER}
    scheduler = [why for why in reasons if why.source is WhySource.POD_SCHEDULED]
    yield not pod.isdisjoint(IMAGE_WORDS), EndReason.IMAGE
    yield bool(scheduler), EndReason.UNSCHEDULABLE
    yield vmim.wait_reason is State.QUOTA, EndReason.QUOTA
    yield vmim.aborted, EndReason.ABORTED
    yield vmi is None or vmi.finished, EndReason.SOURCE_LOST
    yield bool(pod), EndReason.TARGET_LOST


VMIS_KEPT = 10_000
"""For how many VMIs `NodesLeft` keeps the nodes; the VMI that moved longest ago is dropped."""


class NodesLeft:
    """When each VMI last left each node by a successful migration, to count VMs that return."""

    def __init__(self) -> None:
        self._left: dict[str, dict[str, Instant]] = {}

    def record(self, vmi_uid: str, source: str, target: str, at: Instant, window: Seconds) -> bool:
        """Add a migration; True if the VMI had left the target node at most `window` earlier."""
        if not vmi_uid or not source or not target:
            return False
        left = self._left.get(vmi_uid, {})
        recent = {node: instant for node, instant in left.items() if at - instant <= window}
        put_newest(self._left, vmi_uid, recent | {source: at}, most=VMIS_KEPT)
        return target in recent
