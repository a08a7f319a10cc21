"""A KubeVirt cluster for tests: real controllers, simulated nodes."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from exporter.demo import objects
from exporter.demo.objects import Object

from .cluster import RealCluster
from .kubevirt import KubeVirtCluster
from .player import Fate, Outcome, Player
from .polling import pause_since, poll
from .recording import Scene, record
from .resources import EVENTS, VMIS


_QUIET = 0.5
"""If nothing changes for this many seconds, no more changes are expected."""


class Rig:
    """
    A KubeVirt cluster with a `Player`. A key is the "namespace/name" of a VMI.

    Heartbeats are frequent, because only node events trigger KubeVirt's evacuation controller.
    """

    def __init__(self, cluster: KubeVirtCluster, player: Player) -> None:
        self.cluster = cluster
        self.player = player

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, *, audited: bool = False, flags: Iterable[str] = (), **options: Any
    ) -> AsyncIterator[Self]:
        """Run a rig in its own directory, with or without audit log.

        The API server gets `flags`, the player `options`.
        """
        options = {"heartbeat": 2.0} | options
        with tempfile.TemporaryDirectory(prefix="exporter-rig-") as directory:
            control = RealCluster(Path(directory), audited=audited, all_crds=True, flags=flags)
            async with (
                KubeVirtCluster(control) as cluster,
                Player(cluster, **options) as player,
            ):
                yield cls(cluster, player)

    @property
    def login(self) -> tuple[str, str]:
        """The exporter's arguments for this cluster, with the exporter's own permissions."""
        control = self.cluster.control
        return "--kubeconfig", str(control.kubeconfig(control.exporter))

    async def start(
        self, key: str, *fates: Fate | Outcome, node: str = "node-1", **spec: Any
    ) -> Scene:
        """Create a VMI with a plan, and wait until it runs."""
        namespace, name = key.split("/")
        self.player.plan(key, *(fates or ("succeeds",)))
        self.player.place(key, node)
        await self.cluster.create_vmi(name, namespace, **spec)
        return await self.until(key, lambda scene: objects.phase(scene.vmi) == "Running")

    @asynccontextmanager
    async def vmi(self, key: str, *fates: Fate | Outcome, **spec: Any) -> AsyncIterator[Scene]:
        """Run a VMI in its own namespace during the block."""
        await self.cluster.control.namespace(key.partition("/")[0])
        try:
            yield await self.start(key, *fates, **spec)
        finally:
            await self.remove(key)

    async def remove(self, key: str) -> None:
        """Delete a VMI and wait until its objects no longer change."""
        namespace, name = key.split("/")
        await self.cluster.admin.delete(VMIS, namespace, name)

        async def is_gone() -> bool:
            left = await self.cluster.admin.list(VMIS, namespace)
            moving = await self.cluster.vmims(name, namespace)
            return not left["items"] and all(objects.is_final(migration) for migration in moving)

        await poll(is_gone, what=f"{key} gone")

    async def evict(self, key: str, *, descheduler: bool = True) -> str:
        """Evict the VMI's current pod; returns the message of the 429."""
        refusal = await self.cluster.evict(await self.pod(key), descheduler=descheduler)
        assert refusal is not None
        assert refusal.code == 429
        return str(refusal.status["message"])

    async def drain(self, key: str) -> str:
        """Evict the VMI's current pod as a drain does; returns the error's message, if any."""
        refusal = await self.cluster.evict(await self.pod(key), descheduler=False)
        return "" if refusal is None else str(refusal.status["message"])

    async def pod(self, key: str) -> Object:
        """The VMI's current pod."""
        scene = await self.look(key)
        pod = objects.current_pod(scene.vmi, scene.pods)
        assert pod is not None
        return pod

    async def look(self, key: str) -> Scene:
        """The objects of the VMI."""
        namespace, name = key.split("/")
        return Scene(
            await self.cluster.vmi(name, namespace),
            await self.cluster.vmims(name, namespace),
            await self.cluster.pods(name, namespace),
        )

    async def until(
        self, key: str, is_there: Callable[[Scene], object], *, within: float = 60
    ) -> Scene:
        """Wait until the VMI meets a condition, and KubeVirt no longer changes its objects."""
        scene, began = None, time.monotonic()
        try:
            async with asyncio.timeout(within):
                while True:
                    scene = await self.look(key)
                    if is_there(scene) and await self._is_at_rest(key, scene):
                        return scene
                    await asyncio.sleep(pause_since(began))
        except TimeoutError:
            seen = "nothing" if scene is None else json.dumps(scene.outline)
            message = f"{key}: not within {within:g} s; last seen: {seen}"
            print(self.cluster.tails())
            raise TimeoutError(message) from None

    async def _is_at_rest(self, key: str, scene: Scene) -> bool:
        # A change in the meantime shows in the resourceVersion, even if it was undone.
        await asyncio.sleep(_QUIET)
        return await self.look(key) == scene

    async def record(
        self, name: str, source: str, scene: Scene, others: Iterable[Scene] = ()
    ) -> None:
        """Write the scene if `RECORD` is set, or compare it with the recorded one."""
        await record(self.cluster, name, source, scene, others)

    async def events(self, namespace: str) -> list[tuple[str, str]]:
        """Reason and message of the events in a namespace."""
        listed = await self.cluster.admin.list(EVENTS, namespace)
        return [(event["reason"], event["message"]) for event in listed["items"]]
