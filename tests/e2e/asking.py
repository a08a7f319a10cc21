"""A client of the standalone exporter, with TLS and a token, like a pod of the cluster."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.documents import CERTIFICATE, type_section
from tests.e2e.images import ROOT
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAME, NAMESPACE


HOST = f"{NAME}.{NAMESPACE}.svc"
_TIMEOUT = 5.0


@dataclass(frozen=True)
class Caller:
    """A caller with a token, which trusts one CA."""

    trust: ssl.SSLContext
    token: str
    address: str
    """The address to which the caller connects: that of the Service or of a pod."""

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        status, answer = self._request(method, path, body)
        return status, json.loads(answer or "null")

    def read(self, path: str, port: int = 9810) -> str:
        """The text of an answer that must succeed."""
        status, answer = self._request("GET", path, port=port)
        assert status == 200, answer
        return answer

    def is_ready(self) -> bool:
        """Whether the exporter answers that it is ready."""
        with suppress(OSError):
            return self._request("GET", "/readyz")[0] == 200
        return False

    def _request(
        self, method: str, path: str, body: object = None, port: int = 9810
    ) -> tuple[int, str]:
        """The status and the text of an answer, on a new connection."""
        plain = socket.create_connection((self.address, port), _TIMEOUT)
        connection = http.client.HTTPConnection(HOST, timeout=_TIMEOUT)
        connection.sock = self.trust.wrap_socket(plain, server_hostname=HOST)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Authorization": f"Bearer {self.token}"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def verdict(self, namespace: str, name: str) -> dict[str, Any]:
        """The verdict on one VM."""
        body = {"candidates": [{"namespace": namespace, "name": name}], "dryRun": True}
        status, answer = self.ask("POST", "/v1/verdicts", body)
        assert status == 200, answer
        verdict: dict[str, Any] = answer["verdicts"][0]
        return verdict

    def history(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The recorded migrations of a VM."""
        status, answer = self.ask("GET", f"/v1/vmis/{namespace}/{name}")
        assert status == 200, answer
        migrations: list[dict[str, Any]] = answer["migrations"]
        return migrations


@contextmanager
def let_in(
    cluster: Cluster, folder: Path, checkout: Path = ROOT
) -> Iterator[tuple[Terminal, Caller]]:
    """Install two replicas and a caller with permission as documented; remove them later."""
    cluster.kubectl("create", "namespace", "my-tools")
    with cluster.terminal(folder, checkout) as terminal:
        type_section(terminal, CERTIFICATE)
        type_section(terminal, "A caller of your own")
        given = Path(terminal.type_unlisted('echo "$CALLER"').strip())
        service = cluster.get("-n", NAMESPACE, "service", NAME)
        caller = Caller(
            ssl.create_default_context(cafile=given / "ca.crt"),
            (given / "token").read_text().strip(),
            service["spec"]["clusterIP"],
        )
        # The pods are ready, but kube-proxy refuses connections until it has seen that.
        wait_for(caller.is_ready, "the Service forwards to a ready pod")
        yield terminal, caller
    cluster.kubectl("delete", "clusterrolebinding", "my-tools-my-caller")
    cluster.remove("my-tools")


@dataclass
class Load:
    """A background load: it asks about one VM repeatedly, and counts the answers."""

    caller: Caller
    namespace: str
    name: str
    answers: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.answers[self._once()] += 1
            time.sleep(0.02)

    def _once(self) -> str:
        """The reason of a verdict; the caller retries once, as documented."""
        last = ""
        for _ in range(2):
            try:
                return str(self.caller.verdict(self.namespace, self.name)["reason"])
            except (OSError, http.client.HTTPException) as failure:
                last = repr(failure)
        return last
