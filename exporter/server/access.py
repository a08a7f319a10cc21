"""Who may ask: bearer tokens and permissions, as the cluster's API server has them.

As kube-rbac-proxy and controller-runtime's metrics server do: a TokenReview says who a token is,
a SubjectAccessReview whether they may `get` or `post` this path as a non-resource URL. Answers are
kept for a moment, a bounded number of them; a token itself is kept nowhere, only its hash.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from exporter.engine.model import Seconds
from exporter.kube.client import ApiError, ApiServer
from exporter.logs import Trouble


REMEMBERED = 4096
"""How many answers of each kind are kept: who sends ever new tokens fills no more."""
ASKED_AT_ONCE = 16
"""How many reviews of each kind are under way at a time; further callers wait."""
LONGEST_TOKEN = 16_384
PATIENCE: Seconds = 0.8
"""How long the API server may take for a review: the plugin waits a second for its verdict."""
RETRY: Seconds = 5.0
"""After a failure, how long what was granted before holds without asking again."""

_Answer = TypeVar("_Answer")
_Review = TypeVar("_Review")

_TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class Unauthenticated(Exception):
    """Nobody knows who this is (401); the text says why."""


class Forbidden(Exception):
    """It is known who this is, and they may not (403); the text says who and what."""


class CannotTell(Exception):
    """The API server could not be asked (503); the text says why."""


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


class _Memory(Generic[_Answer]):
    """A bounded number of answers, each with the instant at which it was given."""

    def __init__(self, clock: Callable[[], Seconds]) -> None:
        self._clock = clock
        self._answers: OrderedDict[Hashable, tuple[Seconds, _Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: Hashable, *, younger_than: Seconds) -> _Answer | None:
        known = self._answers.get(key)
        return None if known is None or self._clock() - known[0] >= younger_than else known[1]

    def put(self, key: Hashable, answer: _Answer) -> None:
        self._answers[key] = (self._clock(), answer)
        self._answers.move_to_end(key)
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)


class _Asked(Generic[_Answer]):
    """Answers of the API server to one kind of question.

    A yes holds for `keep` seconds, and for `outage` where the API server cannot be asked again;
    a no holds for `keep`. They are kept apart, so that who invents tokens drives out nobody's
    yes. A question that is under way is asked once, whoever wants to know.
    """

    def __init__(self, *, keep: Seconds, outage: Seconds, clock: Callable[[], Seconds]) -> None:
        self._keep = keep
        self._outage = max(keep, outage)
        self._yes = _Memory[_Answer](clock)
        self._no = _Memory[bool](clock)
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._under_way: dict[Hashable, asyncio.Task[_Answer | None]] = {}
        self._clock = clock
        self._failed_until: Seconds | None = None

    def __len__(self) -> int:
        return len(self._yes) + len(self._no)

    async def ask(
        self, key: Hashable, ask: Callable[[], Awaitable[_Answer | None]]
    ) -> _Answer | None:
        """The answer to a question, by its key; None is a no. Raises `CannotTell`."""
        known = self._yes.get(key, younger_than=self._keep)
        if known is not None:
            return known
        if self._no.get(key, younger_than=self._keep):
            return None
        if self._failed_until is not None and self._clock() < self._failed_until:
            known = self._yes.get(key, younger_than=self._outage)
            if known is not None:
                return known
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.ensure_future(self._find_out(key, ask))
            task.add_done_callback(partial(self._end, key))
        return await asyncio.shield(task)

    async def _find_out(
        self, key: Hashable, ask: Callable[[], Awaitable[_Answer | None]]
    ) -> _Answer | None:
        try:
            async with self._asking:
                answer = await ask()
        except CannotTell:
            self._failed_until = self._clock() + RETRY
            known = self._yes.get(key, younger_than=self._outage)
            if known is None:
                raise
            return known
        if answer is None:
            self._no.put(key, answer=True)
        else:
            self._yes.put(key, answer)
        return answer

    def _end(self, key: Hashable, task: asyncio.Task[_Answer | None]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # heard, also where nobody waits for it any more


class Access:
    """Asks the API server, and remembers for `keep` seconds; through an `outage` what it granted.

    `clock` is monotonic.
    """

    def __init__(
        self, api: ApiServer, *, keep: Seconds, outage: Seconds, clock: Callable[[], Seconds]
    ) -> None:
        self._api = api
        self._users = _Asked[_User](keep=keep, outage=outage, clock=clock)
        self._permissions = _Asked[bool](keep=keep, outage=outage, clock=clock)
        self._trouble = Trouble("callers_not_reviewed")

    @property
    def remembered(self) -> int:
        """How many answers are kept."""
        return len(self._users) + len(self._permissions)

    async def check(self, authorization: str | None, method: str, path: str) -> None:
        """Let a request pass, told by its header, method and path, or raise why not.

        Raises `Unauthenticated`, `Forbidden` or `CannotTell`.
        """
        token = _read_token(authorization)
        digest = hashlib.sha256(token.encode()).digest()
        user = await self._users.ask(digest, partial(self._identify, token))
        if user is None:
            raise Unauthenticated("the cluster does not know this token, or it has expired")
        verb = method.lower()
        key = (msgspec.json.encode(user), verb, path)
        if not await self._permissions.ask(key, partial(self._authorize, user, verb, path)):
            raise Forbidden(f"{user.username} may not {verb} the non-resource URL {path}")

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
        """The API server's answer. Its address, and what is wrong with it, is for the log alone."""
        try:
            async with asyncio.timeout(PATIENCE):
                read = msgspec.json.decode(await self._api.review(path, body), type=answer)
        except (ApiError, TimeoutError, msgspec.MsgspecError) as error:
            self._trouble.note(str(error) or f"no answer within {PATIENCE:g} s")
            raise CannotTell("the cluster's API server could not be asked who you are") from None
        self._trouble.end()
        return read


def _read_token(authorization: str | None) -> str:
    if authorization is None:
        raise Unauthenticated("expected the header Authorization: Bearer TOKEN")
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
        raise Unauthenticated("expected the header Authorization: Bearer TOKEN")
    return token
