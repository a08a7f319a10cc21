"""Authentication and authorization of callers by the cluster's API server.

As in kube-rbac-proxy and controller-runtime's metrics server, a TokenReview identifies the user of
a bearer token, and a SubjectAccessReview says whether the user may `get` or `post` this path as a
non-resource URL. A limited number of answers is cached; a token is cached only as a hash.

Both reviews together take at most `PATIENCE`. A caller with an expired yes in the cache waits at
most `RENEWAL_PATIENCE` for a new answer. After that the cached yes still counts, and the review
continues in the background.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Generic, TypeVar

import msgspec
from aiohttp import hdrs
from msgspec import Struct, field

from exporter.engine.facts.model import Seconds
from exporter.errors import MALFORMED
from exporter.kube.client import ApiError, ApiServer
from exporter.logs import Trouble
from exporter.server.http.problems import RETRY_SOON, Refusal


REMEMBERED = 4096
"""The most answers in each cache, so that a flood of new tokens or paths cannot fill the memory."""
ASKED_AT_ONCE = 16
"""The most concurrent reviews of each kind, counted separately for new callers and renewals."""
LONGEST_TOKEN = 16_384
PATIENCE: Seconds = 0.8
"""How long a caller waits for both reviews, and how long one review may take. The descheduler's
plugin waits one second for its verdict."""
RENEWAL_PATIENCE: Seconds = 0.25
"""How long a caller with a cached yes waits; a healthy API server answers faster."""
RETRY: Seconds = 5.0
"""The pause after a failed renewal, in which no cached answer is renewed."""

_Answer = TypeVar("_Answer")

_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class _User(Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _Status(Struct):
    """The status of a TokenReview or of a SubjectAccessReview."""

    authenticated: bool = False
    user: _User = field(default_factory=_User)
    allowed: bool = False


class _Review(Struct):
    status: _Status = field(default_factory=_Status)


class _Cache(Generic[_Answer]):
    """A bounded cache of answers, each with its time and its owner.

    When the cache is full, the owner of the most answers loses its oldest answer. So no owner can
    push out the answers of others.
    """

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._answers: dict[Hashable, tuple[Seconds, _Answer, str]] = {}

    def get(self, key: Hashable, *, younger_than: Seconds) -> _Answer | None:
        entry = self._answers.get(key)
        if entry is None or self._clock() - entry[0] >= younger_than:
            return None
        return entry[1]

    def put(self, key: Hashable, answer: _Answer, owner: str) -> None:
        self.drop(key)
        self._answers[key] = (self._clock(), answer, owner)
        if len(self._answers) > REMEMBERED:
            ((most, _),) = Counter(holder for _, _, holder in self._answers.values()).most_common(1)
            self.drop(next(key for key, (_, _, holder) in self._answers.items() if holder == most))

    def drop(self, key: Hashable) -> None:
        self._answers.pop(key, None)


class _ReviewCache(Generic[_Answer]):
    """The cached answers of the API server to one kind of review.

    A yes counts for `keep` seconds, and for up to `outage` seconds while renewals fail. A no counts
    for `keep` seconds and replaces a yes. Yes and no have separate caches, so that invented tokens
    cannot remove a cached yes. Callers with the same question share one review. Renewals have their
    own slots, so that invented tokens do not delay them.
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

    async def ask(
        self,
        key: Hashable,
        ask: Callable[[], Awaitable[_Answer | None]],
        *,
        owner: str,
        began: Seconds,
    ) -> _Answer | None:
        """The cached or new answer for a key; None means no. Raises `Refusal` (503).

        `owner` is the user, or the peer while the user is unknown. `began` is when the check began,
        by the event loop's clock.
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
            raise _unanswered()
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
                raise _unanswered() from None
            return cached
        try:
            answer = await ask()
        except Refusal:
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
            task.exception()  # otherwise asyncio would log the error


class Access:
    """Asks the API server about callers, and caches its answers for `keep` seconds.

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

    async def check(
        self, authorization: str | None, method: str, path: str, *, peer: str = ""
    ) -> None:
        """Check whether the caller may make this request; `peer` is its IP address.

        Raises `Refusal`: 401 without a known token, 403 if it is not allowed, or 503 if the API
        server has not answered.
        """
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        usable = token.isascii() and 0 < len(token) <= LONGEST_TOKEN
        if scheme.lower() != "bearer" or not usable:
            raise _unauthenticated("expected the header Authorization: Bearer TOKEN")
        digest = hashlib.sha256(token.encode()).digest()
        began = asyncio.get_running_loop().time()
        identify = partial(self._identify, token)
        user = await self._users.ask(digest, identify, owner=peer, began=began)
        if user is None:
            raise _unauthenticated("the cluster does not know this token, or it has expired")
        verb = method.lower()
        key = (msgspec.json.encode(user), verb, path)
        authorize = partial(self._authorize, user, verb, path)
        if not await self._permissions.ask(key, authorize, owner=user.username, began=began):
            detail = f"{user.username} may not {verb} the non-resource URL {path}"
            raise Refusal(403, "Not allowed", detail)

    async def _identify(self, token: str) -> _User | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        status = await self._review(_TOKENS, body)
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
        return (await self._review(_ACCESS, body)).allowed or None

    async def _review(self, path: str, body: Mapping[str, object]) -> _Status:
        """Post a review. The cause of a failure is logged, but not shown to the caller."""
        try:
            async with asyncio.timeout(PATIENCE):
                review = msgspec.json.decode(await self._api.create(path, body), type=_Review)
        except (ApiError, TimeoutError, *MALFORMED) as error:
            self._trouble.record(str(error) or f"no answer within {PATIENCE:g} s")
            raise _unanswered() from None
        self._trouble.end()
        return review.status


def _unauthenticated(detail: str) -> Refusal:
    """The token is missing or unknown; the detail says why."""
    return Refusal(401, "Unauthenticated", detail, {hdrs.WWW_AUTHENTICATE: "Bearer"})


def _unanswered() -> Refusal:
    """The API server did not answer."""
    detail = "the cluster's API server could not check who you are"
    return Refusal(503, "API server unavailable", detail, RETRY_SOON)
