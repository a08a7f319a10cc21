"""The exporter's pod, as far as the demo has one: kubectl reads it, and runs commands in it.

`kubectl exec` speaks the WebSocket protocol v5.channel.k8s.io: the first byte of a message is its
channel (`k8s.io/apimachinery/pkg/util/remotecommand`, `k8s.io/kubelet/pkg/cri/streaming`).
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
from aiohttp import WSMsgType, web

from exporter.demo import objects, status
from exporter.demo.objects import Object


PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, ERROR = 0, 1, 2, 3
INTERRUPT = b"\x03"
"""What a terminal sends for Ctrl-C."""
LABEL = "app.kubernetes.io/name"
APP = NAMESPACE = ACCOUNT = "kubevirt-eviction-exporter"
NAME = f"{APP}-demo"
PROGRAM = ("python", "-m", "exporter")
LOG = "The demo's exporter logs to the terminal of `make run`.\n"

POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {LABEL: APP}},
    "spec": {"containers": [{"name": "exporter", "image": APP}], "serviceAccountName": ACCOUNT},
    "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
}


def find_pods(namespace: str | None) -> Object:
    """The list of the exporter's pods in a namespace, or in all."""
    return objects.build_list("Pod", [POD] if namespace in (None, NAMESPACE) else [])


async def execute(http: web.Request, exporter_url: str) -> web.WebSocketResponse:
    """Run a command of the exporter, and send what it prints; Ctrl-C or a hang-up ends it."""
    socket = web.WebSocketResponse(protocols=(PROTOCOL,))
    await socket.prepare(http)
    command = http.query.getall("command", [])
    if tuple(command[:3]) != PROGRAM:
        text = f"the demo's pod runs only {' '.join(PROGRAM)} ...\n"
        await socket.send_bytes(bytes([STDERR]) + text.encode())
        await _finish(socket, 126)
        return socket
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command[1:]),
        env={**os.environ, "KUBEVIRT_EVICTION_EXPORTER_URL": exporter_url},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    listening = asyncio.create_task(_end_on_interrupt(socket, process))
    try:
        await asyncio.gather(
            _forward(socket, STDOUT, process.stdout), _forward(socket, STDERR, process.stderr)
        )
        await _finish(socket, await process.wait())
    finally:
        listening.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    return socket


async def _forward(
    socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader | None
) -> None:
    while stream is not None and (printed := await stream.read(2**15)):
        await socket.send_bytes(bytes([channel]) + printed)


async def _end_on_interrupt(
    socket: web.WebSocketResponse, process: asyncio.subprocess.Process
) -> None:
    async for message in socket:
        if message.type is WSMsgType.BINARY and message.data == bytes([STDIN]) + INTERRUPT:
            break
    if process.returncode is None:
        process.terminate()


async def _finish(socket: web.WebSocketResponse, code: int) -> None:
    """Send the exit code as the kubelet does, and close."""
    answer = status.success()
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        text = f"command terminated with exit code {code}"
        answer = status.failure(500, "NonZeroExitCode", text, {"causes": causes})
    await socket.send_bytes(bytes([ERROR]) + msgspec.json.encode(answer))
    await socket.close()
