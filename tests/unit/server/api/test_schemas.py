"""The OpenAPI document, which describes the bodies of the query API."""

from exporter.engine.facts.model import Checkpoint, Mismatch, Priority
from exporter.engine.facts.policy import Reason
from exporter.engine.store.requesters import Source
from exporter.server.api.openapi import ROUTES, write_openapi


DOCUMENT = write_openapi()
PATHS = DOCUMENT["paths"]
SCHEMAS = DOCUMENT["components"]["schemas"]


class TestOpenApi:
    """The document at /openapi.json."""

    def test_is_valid(self) -> None:
        """The document is OpenAPI 3.1."""
        # Imported here, because it takes half a second and every worker imports this module.
        from openapi_spec_validator import validate  # noqa: PLC0415

        validate(DOCUMENT)
        assert DOCUMENT["openapi"].startswith("3.1")

    def test_has_every_route(self) -> None:
        """Each route is an operation with its name and its status codes."""
        operations = {
            (path, method): operation
            for path, methods in PATHS.items()
            for method, operation in methods.items()
        }

        assert set(operations) == {(route.path, route.method.lower()) for route in ROUTES}
        for route in ROUTES:
            operation = operations[route.path, route.method.lower()]
            assert operation["operationId"] == route.name
            assert {int(status) for status in operation["responses"]} == {
                200,
                *route.refusals,
                *([304] if route.not_modified else []),
            }

    def test_asks_for_a_token_but_in_probes(self) -> None:
        """Every operation except the probes may need a token."""
        free = {path for path, ways in PATHS.items() if "security" not in next(iter(ways.values()))}

        assert free == {"/livez", "/readyz"}

    def test_enumerates_the_closed_sets(self) -> None:
        """The document lists all reasons, checkpoints and mismatches as enums."""
        assert set(SCHEMAS["Reason"]["enum"]) == set(Reason)
        assert set(SCHEMAS["Checkpoint"]["enum"]) == set(Checkpoint)
        assert set(SCHEMAS["Mismatch"]["enum"]) == set(Mismatch)

    def test_promises_every_field_of_an_answer(self) -> None:
        """All fields of an answer except `override` are required; some may be null."""
        asked = {"VerdictRequest", "Candidate", "Problem"}
        objects = {n: s for n, s in SCHEMAS.items() if "properties" in s and n not in asked}

        assert objects
        for name, schema in objects.items():
            assert set(schema["required"]) == set(schema["properties"]) - {"override"}, name

    def test_says_what_its_fields_mean(self) -> None:
        """Each type has a description, and so has each field whose name does not explain it."""
        plain = {"namespace", "name", "vmiUid", "version", "known", "createdAt"}
        made_of = {"verdicts", "evacuations", "resources"}

        assert all(schema["description"] for schema in SCHEMAS.values())
        for name, schema in SCHEMAS.items():
            silent = {n for n, p in schema.get("properties", {}).items() if "description" not in p}
            assert silent <= plain | made_of, name

    def test_says_how_each_source_is_known(self) -> None:
        """The description of `source` says how the exporter finds each value."""
        found = SCHEMAS["EvacuationAnswer"]["properties"]["source"]["description"]

        assert all(f"`{source}`" in found for source in Source)
        for mark in (*Priority, "kubevirt.io/eviction-source"):
            assert mark in found

    def test_is_camel_case(self) -> None:
        """Every property is camelCase."""
        names = [name for schema in SCHEMAS.values() for name in schema.get("properties", {})]

        assert "effectiveCooldownSeconds" in names
        assert all(name.isalnum() and name[0].islower() for name in names)
