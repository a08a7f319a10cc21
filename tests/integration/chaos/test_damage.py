"""Stored histories that are damaged, of another version, or cannot be written."""

import random
import resource
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from exporter.history.configmap import OWNER
from exporter.history.format import seal, shard_of, split, unseal
from exporter.history.reader import DATA_KEY
from exporter.kube.objects.kubevirt import HISTORY_LABEL
from tests.cluster import VMIS, poll, vmi
from tests.cluster.resources import CONFIG_MAPS
from tests.integration.chaos import SEED
from tests.integration.chaos.kept import (
    another_version,
    counted,
    counted_in,
    remembered,
    shard_bytes,
    shards,
)
from tests.integration.chaos.replica import (
    until_fault,
)
from tests.support.api_servers import RealStage
from tests.support.program import Program, program
from tests.support.stored_history import (
    BRISK,
    FAULTS,
    NAME,
    UNWRITTEN,
    a_keeper,
    count_in_window,
    keeping,
    migrate,
    until_counted,
    until_written,
)


Prove: TypeAlias = Callable[[str], None]
Object: TypeAlias = dict[str, Any]

KNOWN = 8
"""For each VM, the number of migrations that are only in the stored history."""
REGIONS = {
    "magic": range(3),
    "flags and time": range(3, 8),
    "content": range(10, 100),
    "checksum": range(-8, -4),
    "length": range(-4, 0),
}
"""The bytes of a sealed shard, by field."""


def damage(raw: bytes, region: range, rng: random.Random) -> bytes:
    """The data with one bit of this region changed."""
    torn = bytearray(raw)
    torn[rng.choice(region)] ^= 1 << rng.randrange(8)
    return bytes(torn)


async def some_vmis(real: RealStage, namespace: str, count: int) -> list[Object]:
    """Create VMIs; returns this many from different shards, ordered by shard."""
    found: dict[int, Object] = {}
    number = 0
    while len(found) < count:
        number += 1
        made = await real.admin.create(VMIS, vmi(f"db{number}", namespace))
        found.setdefault(shard_of(made["metadata"]["uid"]), made)
    return [found[shard] for shard in sorted(found)]


def sealed(made: list[Object], migrations: int = KNOWN) -> list[bytes]:
    """A sealed shard for each VMI."""
    return list(shards(remembered(one, migrations) for one in made).values())


async def counts(exporter: Program, made: list[Object]) -> list[int]:
    """How many migrations of each VMI the exporter counts."""
    return [
        await count_in_window(exporter, one["metadata"]["namespace"], one["metadata"]["name"])
        for one in made
    ]


async def until_counts(exporter: Program, made: list[Object], wanted: list[int]) -> None:
    """Wait until the exporter counts exactly these numbers of migrations."""

    async def are_so() -> bool:
        return await counts(exporter, made) == wanted

    await poll(are_so, what=f"{wanted} migrations")


@asynccontextmanager
async def with_file(
    real: RealStage, namespace: str, path: Path, **settings: object
) -> AsyncIterator[Program]:
    """A process with its stored history in a file during the block; it must exit with 0."""
    config = {"namespaces": [namespace], "kube": BRISK, "history": f"file:{path}", **settings}
    login = str(real.login.kubeconfig)
    async with program(path.parent, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        yield exporter
        assert await exporter.end() == 0


@pytest.mark.parametrize("seeds", [1, pytest.param(30, marks=pytest.mark.soak)])
async def test_damage_in_every_region_of_a_file(
    real: RealStage, tmp_path: Path, prove: Prove, seeds: int
) -> None:
    """Damage in any part of a shard loses this shard and no other shard of the file."""
    namespace = await real.make_namespace()
    path = tmp_path / "history"
    made = await some_vmis(real, namespace, 8)
    for seed in range(SEED, SEED + seeds):
        rng = random.Random(seed)
        pieces = sealed(made)
        for position, region in enumerate(REGIONS.values()):
            pieces[position] = damage(pieces[position], region, rng)
        pieces[6] = b"\0between\0" + pieces[6]
        pieces[7] = pieces[7][: rng.randrange(1, len(pieces[7]))]
        path.write_bytes(b"".join(pieces))
        async with with_file(real, namespace, path) as exporter:
            # The first two have no magic any more, so they are one piece.
            assert await until_fault(exporter, "damaged") >= 6, f"seed {seed}"
            await until_counts(exporter, made, [0] * 5 + [KNOWN, KNOWN, 0])
            await until_written(exporter)
        survivors = {one["metadata"]["uid"]: KNOWN for one in made[5:7]}
        assert counted_in(path) == survivors, f"seed {seed}: the next file is valid"
    prove(f"damaged file: {seeds} runs from seed {SEED}, 7 damaged shards each, other shards kept")


def _nothing(path: Path, _raw: bytes) -> None:
    path.write_bytes(b"")


def _garbage(path: Path, raw: bytes) -> None:
    path.write_bytes(random.Random(SEED).randbytes(len(raw)))


def _directory(path: Path, _raw: bytes) -> None:
    path.mkdir()


def _unreadable(path: Path, _raw: bytes) -> None:
    """A file that even root cannot read: the first page of a process's memory."""
    path.symlink_to("/proc/self/mem")


def _cut_in_a_head(path: Path, raw: bytes) -> None:
    path.write_bytes(raw[: len(raw) // 3 + 11])


def year_after_9999(raw: bytes) -> bytes:
    """A shard with a valid checksum, whose first migration ended after the year 9999."""
    (entry,) = unseal(raw)
    content = msgspec.msgpack.decode(entry)
    content[3][0][1] = 1e300
    return seal([msgspec.msgpack.encode(content)])


def _no_year(path: Path, raw: bytes) -> None:
    *whole, last = split(raw)
    path.write_bytes(b"".join([*whole, year_after_9999(last)]))


@pytest.mark.parametrize(
    ("spoil", "fault", "left"),
    [
        pytest.param(_nothing, None, 0, id="empty"),
        pytest.param(_garbage, "damaged", 0, id="garbage"),
        pytest.param(_cut_in_a_head, "damaged", 1, id="cut-in-a-head"),
        pytest.param(_no_year, "damaged", 2, id="no-year"),
        pytest.param(_unreadable, "unreadable", 0, id="unreadable"),
        pytest.param(_directory, "unreadable", 0, id="directory"),
    ],
)
async def test_a_file_that_is_none(
    real: RealStage,
    tmp_path: Path,
    spoil: Callable[[Path, bytes], None],
    fault: str | None,
    left: int,
) -> None:
    """An invalid file is logged and counted; the exporter still serves, and writes a valid file."""
    namespace = await real.make_namespace()
    path = tmp_path / "history"
    made = await some_vmis(real, namespace, 3)
    spoil(path, b"".join(sealed(made)))
    async with with_file(real, namespace, path) as exporter:
        if fault is not None:
            assert await until_fault(exporter, fault)
        await until_counts(exporter, made, [KNOWN] * left + [0] * (3 - left))
        for one in made:
            await migrate(real.admin, namespace, one["metadata"]["name"], ago=[30])
        await until_counts(exporter, made, [KNOWN + 1] * left + [1] * (3 - left))
        if path.is_dir():
            assert await until_fault(exporter, "not_written")
            path.rmdir()
        await until_written(exporter)
    assert sorted(counted_in(path).values()) == [1] * (3 - left) + [KNOWN + 1] * left


async def test_a_file_of_another_version_is_kept_for_it(real: RealStage, tmp_path: Path) -> None:
    """After a rollback the exporter reads its own last file, and keeps the newer version's file."""
    namespace = await real.make_namespace()
    path, ours, theirs = (tmp_path / f"history{end}" for end in ("", ".v1", ".v2"))
    made = await some_vmis(real, namespace, 2)
    newer = another_version(b"what a later version knows")
    path.write_bytes(newer)
    ours.write_bytes(b"".join(sealed(made)))
    async with with_file(real, namespace, path) as exporter:
        assert await until_fault(exporter, "unknown_version") == 1
        kept = exporter.events("history_fault")[0]["kept"]
        assert kept == str(theirs)
        await until_counts(exporter, made, [KNOWN, KNOWN])
        await until_written(exporter)
    assert sorted(counted_in(path).values()) == [KNOWN, KNOWN]
    assert theirs.read_bytes() == newer
    assert not ours.exists()


async def test_a_file_of_another_version_that_cannot_be_kept(
    real: RealStage, tmp_path: Path
) -> None:
    """The file of another version is not overwritten until it can be renamed."""
    namespace = await real.make_namespace()
    path, theirs = tmp_path / "history", tmp_path / "history.v2"
    newer = another_version(b"what a later version knows")
    path.write_bytes(newer)
    theirs.mkdir()
    (made,) = await some_vmis(real, namespace, 1)
    async with with_file(real, namespace, path) as exporter:
        await migrate(real.admin, namespace, made["metadata"]["name"], ago=[30])
        assert await until_fault(exporter, "not_written")
        assert path.read_bytes() == newer
        theirs.rmdir()
        await until_written(exporter)
    assert sorted(counted_in(path).values()) == [1]
    assert theirs.read_bytes() == newer


async def test_damage_in_every_region_of_a_configmap(real: RealStage, tmp_path: Path) -> None:
    """A damaged shard is lost alone; a shard of a later version is kept in the same ConfigMap."""
    rng = random.Random(SEED)
    namespace = await real.make_namespace()
    login = str(await a_keeper(real.cluster, namespace))
    made = await some_vmis(real, namespace, 11)
    data: list[dict[str, bytes]] = [{DATA_KEY: raw} for raw in sealed(made)]
    for position, region in enumerate(REGIONS.values()):
        data[position] = {DATA_KEY: damage(data[position][DATA_KEY], region, rng)}
    data[5] = {DATA_KEY: data[5][DATA_KEY][:-3]}
    data[6] = {DATA_KEY: b""}
    data[9] = {DATA_KEY: year_after_9999(data[9][DATA_KEY])}
    newer = another_version(b"what a later version knows")
    data[7] = {DATA_KEY: newer}
    data[8] = {DATA_KEY: newer, f"{DATA_KEY}.v1": data[8][DATA_KEY]}
    names = [f"{NAME}-{shard_of(one['metadata']['uid']):02d}" for one in made]
    for name, content in zip(names, data, strict=True):
        await _apply(real, _config_map(namespace, name, content))
    config = {**keeping(namespace), "namespaces": [namespace]}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        assert await until_fault(exporter, "damaged") >= 8
        assert await until_fault(exporter, "unknown_version") == 2
        await until_counts(exporter, made, [0] * 8 + [KNOWN, 0, KNOWN])
        for one in made:
            await migrate(real.admin, namespace, one["metadata"]["name"], ago=[30])
        await until_counts(exporter, made, [1] * 8 + [KNOWN + 1, 1, KNOWN + 1])
        await until_written(exporter)
        assert await exporter.end() == 0
    found = (await real.admin.list(CONFIG_MAPS, namespace))["items"]
    maps = [one for one in found if one["metadata"]["name"] in names]
    listed = {one["metadata"]["name"]: one["binaryData"] for one in maps}
    kept = {name: list(counted(raw).values()) for name, raw in shard_bytes(maps).items()}
    assert [kept[name] for name in names] == [[1]] * 8 + [[KNOWN + 1], [1], [KNOWN + 1]]
    for name in names[7:9]:
        assert listed[name][f"{DATA_KEY}.v2"] == b64encode(newer).decode()
        assert sorted(listed[name]) == [DATA_KEY, f"{DATA_KEY}.v2"]


async def _apply(real: RealStage, body: Object) -> None:
    """Apply a ConfigMap with the field manager of the exporter."""
    metadata = body["metadata"]
    await real.admin.request(
        "PATCH",
        CONFIG_MAPS.path(metadata["namespace"], metadata["name"]),
        params={"fieldManager": OWNER},
        json=body,
        headers={"Content-Type": "application/apply-patch+yaml"},
    )


def _config_map(namespace: str, name: str, data: Mapping[str, bytes]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {HISTORY_LABEL: NAME},
        },
        "binaryData": {key: b64encode(raw).decode() for key, raw in data.items()},
    }


async def test_a_full_disk(real: RealStage, tmp_path: Path) -> None:
    """Failed writes (ENOSPC, EFBIG) are counted and keep the old file; later writes succeed.

    `/dev/full` in place of the new file causes ENOSPC, and a limit on the size of files causes
    EFBIG.
    """
    namespace = await real.make_namespace()
    path = tmp_path / "history"
    made = await some_vmis(real, namespace, 24)
    path.write_bytes(old := b"".join(sealed(made, 60)))
    part = tmp_path / "history.part"
    part.symlink_to("/dev/full")
    name = made[0]["metadata"]["name"]
    policy = {"maxMigrationCooldown": "0"}
    async with with_file(real, namespace, path, policy=policy) as exporter:
        await until_counted(exporter, namespace, name, 60)
        await migrate(real.admin, namespace, name, ago=[30])
        assert await until_fault(exporter, "not_written")
        assert "No space left" in exporter.events("history_fault")[0]["why"]
        await until_written(exporter)
        assert counted_in(path)[made[0]["metadata"]["uid"]] == 61
        assert not part.exists()

        old = path.read_bytes()
        limit = len(old) // 2
        assert len(exporter.output) < limit / 2, "the log is a file too"
        _limit_files(exporter, limit)
        before = await exporter.sample(FAULTS, fault="not_written")
        await migrate(real.admin, namespace, name, ago=[20])
        await until_counted(exporter, namespace, name, 62)

        async def fails_again() -> bool:
            return await exporter.sample(FAULTS, fault="not_written") >= before + 2

        await poll(fails_again, what="writes that fail")
        assert "File too large" in exporter.events("history_fault")[-1]["why"]
        assert path.read_bytes() == old
        assert not part.exists()
        assert await exporter.sample(UNWRITTEN)
        _limit_files(exporter, resource.RLIM_INFINITY)
        await until_written(exporter)
    assert counted_in(path)[made[0]["metadata"]["uid"]] == 62


def _limit_files(exporter: Program, size: int) -> None:
    """Limit the size of this process's files, so that write(2) fails with EFBIG."""
    _, most = resource.prlimit(exporter.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(exporter.process.pid, resource.RLIMIT_FSIZE, (size, most))


async def test_a_torn_write_is_harmless(real: RealStage, tmp_path: Path) -> None:
    """If a new file is unfinished, the exporter reads the old file and overwrites the new one."""
    namespace = await real.make_namespace()
    path, part = tmp_path / "history", tmp_path / "history.part"
    made = await some_vmis(real, namespace, 2)
    raw = b"".join(sealed(made))
    path.write_bytes(raw)
    part.write_bytes(raw[: len(raw) // 2])
    async with with_file(real, namespace, path) as exporter:
        await until_counts(exporter, made, [KNOWN, KNOWN])
        assert not exporter.events("history_fault")
        await migrate(real.admin, namespace, made[0]["metadata"]["name"], ago=[30])
        await until_counts(exporter, made, [KNOWN + 1, KNOWN])
        await until_written(exporter)
        assert not part.exists()
    assert sorted(counted_in(path).values()) == [KNOWN, KNOWN + 1]
