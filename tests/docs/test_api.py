"""docs/api.md is what the OpenAPI document and the API itself make it."""

from datetime import UTC, datetime

from exporter.demo import Demo
from exporter.server.openapi import ROUTES, write_openapi
from exporter.settings import Listen
from tests.generate.reference import EXAMPLES, ask, write_api
from tests.support.documents import API, read


async def test_it_is_up_to_date() -> None:
    """`make reference` would change nothing; every example answer is held against its schema."""
    assert read(API) == write_api(write_openapi(), await ask())


async def test_its_examples_are_answers() -> None:
    """Every endpoint of the API has an example that is answered 200, and one shows a refusal."""
    answers = await ask()

    assert {route.name for route in ROUTES if route.path.startswith("/v1/")} <= set(EXAMPLES)
    assert {name: answer.status for name, answer in answers.items()} == {
        **dict.fromkeys(EXAMPLES, 200),
        "refused": 422,
    }


def test_it_begins_with_how_to_try_it() -> None:
    """Where the demo answers by default, and a VM that it has in place of the examples'."""
    head = read(API).split("\n## ")[0]
    query, *_ = Listen().query

    assert f"export KUBEVIRT_EVICTION_EXPORTER_URL=http://{query}\n" in head
    assert f"`{'/'.join(Demo(lambda: datetime.now(UTC)).example)}`" in head


def test_every_type_is_in_it() -> None:
    """Each schema of the document has its heading, and each property its row below it."""
    text = read(API)
    for name, schema in write_openapi()["components"]["schemas"].items():
        section = text.split(f"\n### {name}\n")[1].split("\n### ")[0]
        for field in schema.get("properties", {}):
            assert f"\n| `{field}` |" in section, (name, field)
