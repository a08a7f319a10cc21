"""Authentication and authorization of callers by the cluster's API server.

As in kube-rbac-proxy and controller-runtime's metrics server, a TokenReview identifies the user of
a bearer token, and a SubjectAccessReview says whether the user may `get` or `post` this path as a
non-resource URL. A bounded number of answers is cached, keyed by the token's hash.

Both reviews together take at most `PATIENCE`. A caller with an older yes in the cache waits at most
`RENEWAL_PATIENCE` for a new answer; then the cached yes counts, and the review goes on in the
background.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from exporter.engine.model import Seconds
from exporter.kube.client import ApiError, ApiServer
from exporter.logs import Trouble


REMEMBERED = 4096
"""Bounds each cache, so a flood of new tokens or paths cannot grow it."""
ASKED_AT_ONCE = 16
"""The most reviews of each kind in flight: this many for new callers, as many for renewals."""
LONGEST_TOKEN = 16_384
PATIENCE: Seconds = 0.8
"""How long a caller waits for both reviews, and how long one review may take. The descheduler's
plugin waits one second for its verdict."""
RENEWAL_PATIENCE: Seconds = 0.25
"""How long a known caller waits; a healthy API server answers faster."""
RETRY: Seconds = 5.0
"""After a failed renewal, how long cached answers count without a new attempt."""

_Answer = TypeVar("_Answer")
_Review = TypeVar("_Review")

_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_NO_ANSWER = "the cluster's API server could not check who you are"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class Unauthenticated(Exception):
    """The token is missing or unknown (401); the message says why."""


class AccessDenied(Exception):
    """The user may not call this path (403); the message says who and what."""


class ReviewUnavailable(Exception):
    """The API server did not answer (503)."""


class _User(Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(Struct):
    authenticated: bool = False
    user: _User = field(default_factory=_User)


class _TokenReview(Struct):
    status: _TokenStatus = field(default_factory=_TokenStatus)


class _AccessStatus(Struct):
    allowed: bool = False


class _AccessReview(Struct):
    status: _AccessStatus = field(default_factory=_AccessStatus)


class _Cache(Generic[_Answer]):
    """A bounded cache of answers and when they were given, by owner.

    When it is full, the owner of the most answers loses the oldest of them, so nobody can throw out
    what is known of others.
    """

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._owners: dict[Hashable, str] = {}
        self._answers: dict[str, dict[Hashable, tuple[Seconds, _Answer]]] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, key: Hashable, *, younger_than: Seconds) -> _Answer | None:
        owner = self._owners.get(key)
        if owner is None:
            return None
        given, answer = self._answers[owner][key]
        return None if self._clock() - given >= younger_than else answer

    def put(self, key: Hashable, answer: _Answer, owner: str) -> None:
        self.drop(key)
        self._owners[key] = owner
        self._answers.setdefault(owner, {})[key] = (self._clock(), answer)
        if len(self._owners) > REMEMBERED:
            most = max(self._answers, key=lambda one: len(self._answers[one]))
            self.drop(next(iter(self._answers[most])))

    def drop(self, key: Hashable) -> None:
        """Drop a cached answer."""
        owner = self._owners.pop(key, None)
        if owner is not None:
            del self._answers[owner][key]
            if not self._answers[owner]:
                del self._answers[owner]


class _ReviewCache(Generic[_Answer]):
    """The cached answers of the API server to one kind of review.

    A yes counts for `keep` seconds, and for up to `outage` while a renewal fails; a no counts for
    `keep` and replaces a yes. The two are cached apart, so that invented tokens evict nobody's
    yes. Callers with the same question share one review. Renewals have their own slots, so that
    invented tokens do not delay them.
    """

    def __init__(self, *, keep: Seconds, outage: Seconds, clock: Callable[[], Seconds]) -> None:
        self._keep = keep
        self._outage = max(keep, outage)
        self._yes = _Cache[_Answer](clock)
        self._no = _Cache[bool](clock)
        self._renewals = asyncio.Semaphore(ASKED_AT_ONCE)
        self._first_questions = asyncio.Semaphore(ASKED_AT_ONCE)
        self._under_way: dict[Hashable, asyncio.Task[_Answer | None]] = {}
        self._clock = clock
        self._failed_until: Seconds = -math.inf

    def __len__(self) -> int:
        return len(self._yes) + len(self._no)

    async def ask(
        self,
        key: Hashable,
        ask: Callable[[], Awaitable[_Answer | None]],
        *,
        owner: str,
        began: Seconds,
    ) -> _Answer | None:
        """The cached or new answer for a key; None is a no. Raises `ReviewUnavailable`.

        `owner` is the user, or the peer as long as there is none. `began` is the start of the check
        on the event loop's clock.
        """
        fresh = self._yes.get(key, younger_than=self._keep)
        if fresh is not None:
            return fresh
        if self._no.get(key, younger_than=self._keep):
            return None
        cached = self._yes.get(key, younger_than=self._outage)
        if cached is not None and self._clock() < self._failed_until:
            return cached
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.ensure_future(
                self._find_out(key, ask, cached, owner)
            )
            task.add_done_callback(partial(self._end, key))
        patience = PATIENCE if cached is None else RENEWAL_PATIENCE
        left = began + patience - asyncio.get_running_loop().time()
        await asyncio.wait([task], timeout=max(0.0, left))
        if task.done():
            return task.result()
        if cached is None:
            raise ReviewUnavailable(_NO_ANSWER)
        return cached

    async def _find_out(
        self,
        key: Hashable,
        ask: Callable[[], Awaitable[_Answer | None]],
        cached: _Answer | None,
        owner: str,
    ) -> _Answer | None:
        slots = self._first_questions if cached is None else self._renewals
        try:
            async with asyncio.timeout(PATIENCE):
                await slots.acquire()
        except TimeoutError:
            if cached is None:
                raise ReviewUnavailable(_NO_ANSWER) from None
            return cached
        try:
            answer = await ask()
        except ReviewUnavailable:
            if cached is None:
                raise
            self._failed_until = self._clock() + RETRY
            return cached
        finally:
            slots.release()
        if answer is None:
            self._yes.drop(key)
            self._no.put(key, answer=True, owner=owner)
        else:
            self._yes.put(key, answer, answer.username if isinstance(answer, _User) else owner)
        return answer

    def _end(self, key: Hashable, task: asyncio.Task[_Answer | None]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # retrieve it, even if no caller waits any more


class Access:
    """Checks callers with the API server and caches its answers for `keep` seconds.

    While the API server does not answer, a cached yes counts for up to `outage` seconds. `clock` is
    monotonic.
    """

    def __init__(
        self, api: ApiServer, *, keep: Seconds, outage: Seconds, clock: Callable[[], Seconds]
    ) -> None:
        self._api = api
        self._users = _ReviewCache[_User](keep=keep, outage=outage, clock=clock)
        self._permissions = _ReviewCache[bool](keep=keep, outage=outage, clock=clock)
        self._trouble = Trouble("callers_not_reviewed")

    @property
    def remembered(self) -> int:
        """How many answers are cached."""
        return len(self._users) + len(self._permissions)

    async def check(
        self, authorization: str | None, method: str, path: str, *, peer: str = ""
    ) -> None:
        """Return if the caller may make this request; `peer` is its IP address.

        Raises `Unauthenticated`, `AccessDenied` or `ReviewUnavailable`.
        """
        token = _read_token(authorization)
        digest = hashlib.sha256(token.encode()).digest()
        began = asyncio.get_running_loop().time()
        identify = partial(self._identify, token)
        user = await self._users.ask(digest, identify, owner=peer, began=began)
        if user is None:
            raise Unauthenticated("the cluster does not know this token, or it has expired")
        verb = method.lower()
        key = (msgspec.json.encode(user), verb, path)
        authorize = partial(self._authorize, user, verb, path)
        if not await self._permissions.ask(key, authorize, owner=user.username, began=began):
            raise AccessDenied(f"{user.username} may not {verb} the non-resource URL {path}")

    async def _identify(self, token: str) -> _User | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        status = (await self._review(_TOKENS, body, _TokenReview)).status
        return status.user if status.authenticated else None

    async def _authorize(self, user: _User, verb: str, path: str) -> bool | None:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": user.username,
                "uid": user.uid,
                "groups": user.groups,
                "extra": user.extra,
                "nonResourceAttributes": {"path": path, "verb": verb},
            },
        }
        review = await self._review(_ACCESS, body, _AccessReview)
        return True if review.status.allowed else None

    async def _review(
        self, path: str, body: Mapping[str, object], answer: type[_Review]
    ) -> _Review:
        """Post a review. The cause of a failure is logged, but not shown to the caller."""
        try:
            async with asyncio.timeout(PATIENCE):
                read = msgspec.json.decode(await self._api.create(path, body), type=answer)
        except (ApiError, TimeoutError, msgspec.MsgspecError) as error:
            self._trouble.note(str(error) or f"no answer within {PATIENCE:g} s")
            raise ReviewUnavailable(_NO_ANSWER) from None
        self._trouble.end()
        return read


def _read_token(authorization: str | None) -> str:
    if authorization is None:
        raise Unauthenticated("expected the header Authorization: Bearer TOKEN")
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    usable = token.isascii() and 0 < len(token) <= LONGEST_TOKEN
    if scheme.lower() != "bearer" or not usable:
        raise Unauthenticated("expected the header Authorization: Bearer TOKEN")
    return token
