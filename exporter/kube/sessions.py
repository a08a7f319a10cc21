"""HTTP sessions with the API server: one for each login, and when to log in again.

The module `login` finds the credentials, and kubernetes_asyncio provides the connection.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from exporter.engine.facts.model import Instant, Seconds
from exporter.kube.kubeconfig import NoCredentials
from exporter.kube.lean_import import HttpClient
from exporter.kube.login import Access, Login, log_in


RENEWED_BEFORE: Seconds = 60.0
"""How long before they expire credentials are renewed, but never before three quarters of their
time."""
RENEWAL_PAUSE: Seconds = 10.0
"""The pause after a renewal that failed, while the credentials are still valid."""
READ_BUFFER = 2**18
"""At twice this many bytes, no more of a response is received until some are read."""


@dataclass
class Session:
    """A client with its credentials, and the number of requests that use it now."""

    client: HttpClient
    access: Access
    due_at: Instant
    """When to renew the credentials."""
    users: int = 0


class Sessions:
    """The present session, and those before it whose requests are still running.

    `logins` is how many logins were begun.
    """

    def __init__(self, login: Login, clock: Callable[[], Instant]) -> None:
        self._login = login
        self._clock = clock
        self._session: Session | None = None
        self._logging_in: asyncio.Task[None] | None = None
        self.logins = 0

    async def close(self) -> None:
        """End a login that is running, and the present session."""
        if self._logging_in is not None:
            self._logging_in.cancel()
            await asyncio.wait([self._logging_in])
        if self._session is not None:
            await self._session.client.close()

    async def current(self) -> Session:
        """The session. If there is none, all callers wait for the same login.

        Credentials that expire soon are renewed meanwhile. Raises `NoCredentials` or
        `TimeoutError`.
        """
        now, session = self._clock(), self._session
        if session is not None and now >= session.access.expires_at:
            await asyncio.shield(self._begin_login())
        elif session is not None and now >= session.due_at:
            _ = self._begin_login()  # requests go on with the old credentials meanwhile
        while self._session is None:
            await asyncio.shield(self._begin_login())
        return self._session

    async def renew(self, distrusted: Session | None = None) -> None:
        """Log in again before the next request. Running requests finish with the old session.

        A `distrusted` session may have been replaced already.
        """
        session = self._session
        if session is not None and distrusted in (None, session):
            self._session = None
            await self.close_unused(session)

    async def close_unused(self, session: Session) -> None:
        """Close a session if it has been replaced and none of its requests is running."""
        if session is not self._session and not session.users:
            await session.client.close()

    def _begin_login(self) -> asyncio.Task[None]:
        """The login that is running, or else a new one."""
        if self._logging_in is None or self._logging_in.done():
            self._logging_in = asyncio.create_task(self._log_in())
            # Otherwise asyncio logs the error of a login for which no request waits any more.
            self._logging_in.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._logging_in

    async def _log_in(self) -> None:
        self.logins += 1
        replaced = self._session
        try:
            access = await log_in(self._login)
        except (TimeoutError, NoCredentials):
            if replaced is not None:
                replaced.due_at = self._clock() + RENEWAL_PAUSE
            raise
        left = max(0.0, access.expires_at - self._clock())
        due_at = access.expires_at - min(RENEWED_BEFORE, left / 4)
        self._session = Session(_make_client(access), access, due_at)
        if replaced is not None:
            await self.close_unused(replaced)


def _make_client(access: Access) -> HttpClient:
    account = access.account
    session = aiohttp.ClientSession(
        # Unlimited: each watch keeps a connection open.
        connector=aiohttp.TCPConnector(limit=0, ssl=access.tls or True),
        headers=account.impersonation,
        read_bufsize=READ_BUFFER,
    )
    return HttpClient(session, server_name=account.server_name, proxy=access.proxy)
