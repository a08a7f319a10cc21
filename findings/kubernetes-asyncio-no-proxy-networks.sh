#!/usr/bin/env bash
# kubernetes-asyncio 36.1.0 with aiohttp 3.14.5: networks in NO_PROXY do not count.
#
# OpenShift and other installers write HTTPS_PROXY and NO_PROXY into pods, with the networks of
# services and pods in NO_PROXY: 10.96.0.0/12. Programs in Go (and curl since 7.86) then connect
# directly to the API server's address, 10.96.0.1. This library leaves the choice to aiohttp, which
# asks urllib, which compares only the ends of names. So the request goes to the proxy, which
# usually cannot reach the cluster. The same variables without the network's length work.
#
# Seen: "NO_PROXY=10.96.0.0/12: through the proxy" and "NO_PROXY=10.96.0.1: directly"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes-asyncio==36.1.0
cd "$folder"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check aiohttp==3.14.5
cat >probe.py <<'PYTHON'
import asyncio
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from kubernetes_asyncio.client import ApiClient, Configuration


class Proxy(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_CONNECT(self) -> None:
        self.asked.append(self.path)
        self.send_error(502)

    def log_message(self, *_: object) -> None:
        pass


async def ask(excluded: str) -> str:
    Proxy.asked.clear()
    os.environ["NO_PROXY"] = excluded
    configuration = Configuration()
    configuration.host = "https://10.96.0.1"
    async with ApiClient(configuration) as client:
        try:
            await client.call_api("/version", "GET", _request_timeout=2)
        except Exception:
            pass
    return "through the proxy" if Proxy.asked else "directly"


server = HTTPServer(("127.0.0.1", 0), Proxy)
Thread(target=server.serve_forever, daemon=True).start()
os.environ["HTTPS_PROXY"] = f"http://127.0.0.1:{server.server_port}"
for excluded in ("10.96.0.0/12", "10.96.0.1"):
    print(f"NO_PROXY={excluded}: {asyncio.run(ask(excluded))}")
PYTHON
seen=$(venv/bin/python probe.py)
echo "$seen"
expected='NO_PROXY=10.96.0.0/12: through the proxy
NO_PROXY=10.96.0.1: directly'
[ "$seen" = "$expected" ]
