"""How a reflector goes on after each error, such as 410, 403 or silence."""

import random
from dataclasses import KW_ONLY, dataclass

from exporter.engine.facts.model import Seconds
from exporter.health import Restart
from exporter.kube.client import (
    Absent,
    ApiError,
    Denied,
    Expired,
    Overloaded,
    Silent,
    Unconnected,
    Unsupported,
    error_of,
)
from exporter.kube.objects.kubevirt import Bookmark, Changed, Deleted, Failed


SOON: Seconds = 1.5
"""The longest pause while a server starts: with its jitter, at most one request a second."""


@dataclass(frozen=True)
class Recovery:
    """How to go on after an error.

    `relist`: forget the resourceVersion and list again. `log_in`: load the credentials again, and
    go on without the resource if the error persists. `longest_pause` caps the backoff.
    `judges_version`: the resourceVersion may be the cause if the error repeats.
    """

    restart: Restart
    relist: bool = False
    log_in: bool = False
    longest_pause: Seconds | None = None
    judges_version: bool = True


_RECOVERIES: dict[type[ApiError], Recovery] = {
    Expired: Recovery(Restart.EXPIRED, relist=True),
    Unsupported: Recovery(Restart.UNREACHABLE, relist=True),
    # A server that was restored from a backup sends nothing, not even bookmarks, until it reaches
    # our resourceVersion. So the watch must not resume from that version.
    Silent: Recovery(Restart.SILENT, relist=True),
    Denied: Recovery(Restart.DENIED, log_in=True),
    Absent: Recovery(Restart.ABSENT, log_in=True, longest_pause=5.0),
    Overloaded: Recovery(Restart.OVERLOADED, judges_version=False),
    # A connection that is not made costs nobody much, and a server that restarts is back sooner
    # than the longest pause ends.
    Unconnected: Recovery(Restart.UNREACHABLE, longest_pause=SOON, judges_version=False),
    ApiError: Recovery(Restart.UNREACHABLE),
}
"""The recoveries, by the class of the error or the nearest base class."""


@dataclass
class ExponentialBackoff:
    """Random pauses: between two thirds of a bound and the bound, which then doubles."""

    rng: random.Random
    _: KW_ONLY
    first: Seconds = 0.2
    most: Seconds = 30.0

    def __post_init__(self) -> None:
        self._bound = self.first

    def next(self, longest: Seconds | None = None) -> Seconds:
        """The pause before the next attempt, of at most `longest`."""
        bound = self._bound if longest is None else min(self._bound, longest)
        self._bound = min(self.most, self._bound * 2)
        return bound * self.rng.uniform(2 / 3, 1.0)

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._bound = self.first

    def shorten(self) -> None:
        """Go back to a pause of at most `SOON`, because the answer is another one.

        A server that starts refuses connections, then everybody without roles (403), then requests
        before its storage is ready (429), then old versions (410): each is progress.
        """
        self._bound = min(self._bound, SOON)


def recovery_from(error: ApiError) -> Recovery:
    """How to go on after this error."""
    return next(_RECOVERIES[kind] for kind in type(error).__mro__ if kind in _RECOVERIES)


def error_of_status(failed: Failed) -> ApiError:
    """The error that a watch reported in an ERROR event."""
    code = 410 if failed.reason in ("Expired", "Gone") else failed.code
    return error_of(code, f"{failed.reason} {failed.message}".strip())


def unexpected_in_list(event: Changed | Deleted | Bookmark) -> Unsupported:
    """The error for an event that must not come before the end of a streamed list."""
    kind = {Changed: "MODIFIED", Deleted: "DELETED"}.get(type(event), "BOOKMARK")
    return Unsupported(f"a {kind} before the list's end: sendInitialEvents was ignored")
