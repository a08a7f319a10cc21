"""The exporter in a pod logs in with a cluster's proxies, an old CA and a token that is rotated.

The image has Python 3.13, which by itself accepts no certificate without key identifiers.
"""

import asyncio
import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.asking import Caller, Load, let_in
from tests.e2e.cluster import DEPLOYMENT, Cluster, Object, wait_for
from tests.e2e.node import ADDRESSES, SERVER
from tests.generate.manifests import NAME, NAMESPACE
from tests.support.odd_certificates import write_certificates
from tests.support.relay import Gate


SERVICES = "10.96.0.0/24"
"""The network of the cluster's services, and of the API server's address in a pod."""
PROXIES = ("HTTPS_PROXY=http://192.0.2.1:3128", "HTTP_PROXY=http://192.0.2.1:3128")
MOUNTED = "/var/run/secrets/kubernetes.io/serviceaccount"
READ_AGAIN = 65.0
"""The exporter reads its token again each minute."""
FORGOTTEN = 15.0
"""The API server remembers for ten seconds that a token was good."""


@pytest.fixture(scope="module")
def caller(cluster: Cluster, scratch: Path) -> Iterator[Caller]:
    """A caller, whose token the exporter shows to the API server."""
    with let_in(cluster, scratch) as (_, caller):
        yield caller


def test_the_proxies_of_a_cluster(cluster: Cluster, caller: Caller) -> None:
    """The API server's address is in a network of NO_PROXY, so the proxy is not asked."""
    excluded = f"NO_PROXY=.cluster.local,.svc,{SERVICES},localhost"
    cluster.kubectl("-n", NAMESPACE, "set", "env", DEPLOYMENT, *PROXIES, excluded)
    cluster.rolled_out()
    output = cluster.exec("python", "-m", "exporter", "status")
    without = [f"{name.partition('=')[0]}-" for name in (*PROXIES, excluded)]
    cluster.kubectl("-n", NAMESPACE, "set", "env", DEPLOYMENT, *without)
    cluster.rolled_out()

    assert "Healthy" in output
    wait_for(caller.is_ready, "the replicas without proxies")


def test_an_old_ca_and_a_token_that_is_rotated(
    cluster: Cluster, caller: Caller, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """The API server's certificates have no key identifiers; no answer fails while a token ends."""
    with old_server(cluster, tmp_path) as port:
        mount(cluster, tmp_path / "old-ca.crt", token_for(cluster, "first"))
        cluster.kubectl("-n", NAMESPACE, "patch", DEPLOYMENT, "-p", json.dumps(surround(port)))
        cluster.rolled_out()
        wait_for(caller.is_ready, "the replicas behind the old server")
        second = token_for(cluster, "second")
        with Load(caller, "shop", "db1") as load:
            mount(cluster, tmp_path / "old-ca.crt", second)
            wait_for(lambda: second in shown(cluster), "the new token in the pods")
            read_again = time.monotonic() + READ_AGAIN
            wait_for(lambda: time.monotonic() > read_again, "a minute")
            cluster.kubectl("-n", NAMESPACE, "delete", "secret", "first")
            forgotten = time.monotonic() + FORGOTTEN
            wait_for(lambda: time.monotonic() > forgotten, "an end of the first token")
        cluster.kubectl("-n", NAMESPACE, "rollout", "undo", DEPLOYMENT)
        cluster.rolled_out()

    assert len(load.answers) == 1, load.answers
    prove(f"a rotated token, behind an old CA: {sum(load.answers.values())} answers, none failed")


@contextmanager
def old_server(cluster: Cluster, folder: Path) -> Iterator[int]:
    """A server with certificates without key identifiers before the API server; yields its port."""
    write_certificates(folder, ADDRESSES["n1"])
    loop, begun = asyncio.new_event_loop(), threading.Event()
    ended, ports = asyncio.Event(), list[int]()

    async def relay() -> None:
        trust = ssl.create_default_context(cafile=cluster.directory / "ca.crt")
        gate = Gate(SERVER, folder, certificate="old-server", host="0.0.0.0", onward=trust)  # noqa: S104
        async with gate:
            ports.append(int(gate.url.rpartition(":")[2]))
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(relay(),))
    thread.start()
    begun.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def token_for(cluster: Cluster, secret: str) -> str:
    """A token of the exporter's account, which ends when this new Secret is deleted."""
    cluster.kubectl("-n", NAMESPACE, "create", "secret", "generic", secret)
    bound = ("--bound-object-kind=Secret", f"--bound-object-name={secret}")
    return cluster.kubectl("-n", NAMESPACE, "create", "token", NAME, *bound).strip()


def mount(cluster: Cluster, authority: Path, token: str) -> None:
    """Write the Secret that stands in for the account's volume."""
    files = {"ca.crt": authority.read_text(), "token": token, "namespace": NAMESPACE}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
    metadata = {"name": "account", "namespace": NAMESPACE}
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
    cluster.apply([secret])


def surround(port: int) -> Object:
    """A patch for the Deployment: this API server, and the Secret as the account's volume."""
    address = {"KUBERNETES_SERVICE_HOST": ADDRESSES["n1"], "KUBERNETES_SERVICE_PORT": str(port)}
    container = {
        "name": "exporter",
        "env": [{"name": name, "value": value} for name, value in address.items()],
        "volumeMounts": [{"name": "account", "mountPath": MOUNTED, "readOnly": True}],
    }
    volumes = [{"name": "account", "secret": {"secretName": "account"}}]
    pod = {"automountServiceAccountToken": False, "containers": [container], "volumes": volumes}
    return {"spec": {"template": {"spec": pod}}}


def shown(cluster: Cluster) -> str:
    """The token in the first pod, as the kubelet has written it."""
    return cluster.exec("python", "-c", f"print(open('{MOUNTED}/token').read())")
