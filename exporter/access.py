"""Who may ask: bearer tokens and permissions, as the cluster's API server has them.

As kube-rbac-proxy and controller-runtime's metrics server do: a TokenReview says who a token is,
a SubjectAccessReview whether they may `get` or `post` this path as a non-resource URL. Answers are
kept for a moment, a bounded number of them; a token itself is kept nowhere, only its hash.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct, field

from exporter.kube import ApiError, ApiServer
from exporter.model import Seconds


REMEMBERED = 4096
"""How many answers are kept: who sends a new token with each request fills no more."""
ASKED_AT_ONCE = 16
"""How many reviews are under way at a time; further callers wait."""
LONGEST_TOKEN = 16_384

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
    """A bounded number of answers, each for a while; a refusal is an answer too."""

    def __init__(self, keep: Seconds, clock: Callable[[], Seconds]) -> None:
        self._keep = keep
        self._clock = clock
        self._answers: OrderedDict[Hashable, tuple[Seconds, _Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: Hashable) -> _Answer | None:
        known = self._answers.get(key)
        return None if known is None or known[0] <= self._clock() else known[1]

    def put(self, key: Hashable, answer: _Answer) -> _Answer:
        self._answers[key] = (self._clock() + self._keep, answer)
        self._answers.move_to_end(key)
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return answer


class Access:
    """Asks the API server, and remembers for `keep` seconds. `clock` is monotonic."""

    def __init__(self, api: ApiServer, *, keep: Seconds, clock: Callable[[], Seconds]) -> None:
        self._api = api
        self._users = _Memory[_User | Unauthenticated](keep, clock)
        self._permissions = _Memory[bool](keep, clock)
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)

    @property
    def remembered(self) -> int:
        """How many answers are kept."""
        return len(self._users) + len(self._permissions)

    async def check(self, authorization: str | None, method: str, path: str) -> None:
        """Let a request pass, told by its header, method and path, or raise why not.

        Raises `Unauthenticated`, `Forbidden` or `CannotTell`.
        """
        token = _read_token(authorization)
        user = await self._identify(token)
        if isinstance(user, Unauthenticated):
            raise Unauthenticated(str(user))
        verb = method.lower()
        if not await self._authorize(user, verb, path):
            raise Forbidden(f"{user.username} may not {verb} the non-resource URL {path}")

    async def _identify(self, token: str) -> _User | Unauthenticated:
        key = hashlib.sha256(token.encode()).digest()
        known = self._users.get(key)
        if known is not None:
            return known
        async with self._asking:
            body = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenReview",
                "spec": {"token": token},
            }
            status = (await self._review(_TOKENS, body, _TokenReview)).status
        if status.authenticated:
            return self._users.put(key, status.user)
        return self._users.put(
            key, Unauthenticated("the cluster does not know this token, or it has expired")
        )

    async def _authorize(self, user: _User, verb: str, path: str) -> bool:
        key = (msgspec.json.encode(user), verb, path)
        known = self._permissions.get(key)
        if known is not None:
            return known
        async with self._asking:
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
        return self._permissions.put(key, review.status.allowed)

    async def _review(
        self, path: str, body: Mapping[str, object], answer: type[_Review]
    ) -> _Review:
        try:
            return msgspec.json.decode(await self._api.review(path, body), type=answer)
        except (ApiError, msgspec.MsgspecError) as error:
            raise CannotTell(f"the API server could not be asked: {error}") from None


def _read_token(authorization: str | None) -> str:
    if authorization is None:
        raise Unauthenticated("expected the header Authorization: Bearer TOKEN")
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
        raise Unauthenticated("expected the header Authorization: Bearer TOKEN")
    return token
