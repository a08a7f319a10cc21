"""docs/api.md is generated from the OpenAPI document and the API's answers."""

import asyncio
import re
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import hdrs

from exporter.demo import Demo
from exporter.server.api.openapi import ROUTES, write_openapi
from exporter.server.apps import make_query_app
from exporter.server.http.problems import RETRY_SOON
from tests.generate.reference import EXAMPLES, ask, write_api
from tests.support.documents import API, REFERENCE, code_blocks, read
from tests.support.serving import serving
from tests.unit.server.api.test_handlers import ServedApi


async def test_it_is_up_to_date() -> None:
    """`make reference` would change nothing, and every example answer matches its schema."""
    assert read(API) == write_api(read(API), write_openapi(), await ask())


def test_each_endpoint_has_an_example() -> None:
    """The answer of every endpoint under /v1/ is asked for, and compared with its schema."""
    names = {route.name for route in ROUTES if route.path.startswith("/v1/")}
    assert names <= EXAMPLES.keys()


def test_its_examples_name_vms_of_the_demo() -> None:
    """The examples of requests name a VM of the demo."""
    vms = {(vm.namespace, vm.name) for vm in Demo(lambda: datetime.now(UTC)).scenario.vms}
    asked = EXAMPLES["verdicts"].body or {}
    named = {(candidate["namespace"], candidate["name"]) for candidate in asked["candidates"]}
    named |= set(re.findall(r"/v1/vmis/(\w+)/([\w-]+)", EXAMPLES["vmi"].path))

    assert len(named) == 1
    assert named <= vms
    assert "checkpoint" not in asked


async def test_the_caller_keeps_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 304 or a change renews the copy of the example caller. An expired copy gives no answer."""
    (source,) = code_blocks(read(API), "python")
    caller: dict[str, Any] = {}
    exec(source, caller)  # noqa: S102 (the document's own lines)
    api = ServedApi()
    api.cool("churn-1")
    renew, may_evict, copy = caller["renew"], caller["may_evict"], caller["copy"]
    assert may_evict("shop", "churn-1") is None

    async with serving(make_query_app(api.service)) as url:
        monkeypatch.setenv("KUBEVIRT_EVICTION_EXPORTER_URL", url)
        await asyncio.to_thread(renew)
        first = dict(copy)
        assert (may_evict("shop", "churn-1"), may_evict("shop", "other")) == (False, True)
        await asyncio.to_thread(renew, 0.1)
        assert copy["until"] > first["until"]
        assert copy == first | {"until": copy["until"]}
        waiting = asyncio.create_task(asyncio.to_thread(renew))
        await asyncio.sleep(0)
        api.cool("other", uid="u2")
        await waiting
        assert may_evict("shop", "other") is False
        changed = copy["etag"]
        api.clock.instant += 200.0
        await asyncio.to_thread(renew)
        assert copy["etag"] not in (changed, first["etag"])
        assert copy["stale"]

        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        kept = dict(copy)
        api.service.closing = True
        await asyncio.to_thread(renew)
    await asyncio.to_thread(renew)
    assert slept == [float(RETRY_SOON[hdrs.RETRY_AFTER]), 5]
    assert copy == kept
    api.service.closing = False
    async with serving(make_query_app(api.service)) as url:
        monkeypatch.setenv("KUBEVIRT_EVICTION_EXPORTER_URL", url)
        await asyncio.to_thread(renew, 0.1)
        assert copy["until"] > kept["until"]
    copy["until"] = 0.0
    assert may_evict("shop", "other") is None


def test_every_type_is_in_it() -> None:
    """Each type has a row or a chapter, and each of its fields a row there or where it says."""
    text = read(API)

    def section(name: str) -> str:
        return text.split(f"\n### {name}\n")[1].split("\n### ")[0]

    for name, schema in write_openapi()["components"]["schemas"].items():
        if "enum" in schema:
            (row,) = re.findall(rf"^\| `{name}` \| .*", section("Words"), re.MULTILINE)
            if "](reference.md#" in row:
                assert all(f"\n| `{value}` |" in read(REFERENCE) for value in schema["enum"])
            else:
                assert all(f"`{value}`" in row for value in schema["enum"])
            continue
        described = section(name)
        common = re.findall(
            r"^\[Common fields\]\(#common-fields\): (.*)\.$", described, re.MULTILINE
        )
        base = re.findall(r"^It has all fields of \[`(\w+)`\]", described, re.MULTILINE)
        for field in schema["properties"]:
            places = [section("Common fields") if f"`{field}`" in "".join(common) else described]
            places += [section(name) for name in base]
            places += [section("Common fields") for name in base if f"`{field}`" in section(name)]
            assert any(f"\n| `{field}` |" in place for place in places), (name, field)
