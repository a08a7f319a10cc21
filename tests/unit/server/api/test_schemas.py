"""The OpenAPI document, which describes the bodies of the query API."""

from exporter.server.api.openapi import write_openapi


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

    def test_asks_for_a_token_but_in_probes_and_runbooks(self) -> None:
        """Every operation except the probes and the runbooks may need a token."""
        free = {path for path, ways in PATHS.items() if "security" not in next(iter(ways.values()))}

        assert free == {"/livez", "/readyz", "/runbooks", "/runbooks/{runbook}"}

    def test_promises_every_field_of_an_answer(self) -> None:
        """All fields of an answer except `override` are required; some may be null."""
        asked = {"VerdictRequest", "Candidate", "Problem"}
        objects = {n: s for n, s in SCHEMAS.items() if "properties" in s and n not in asked}

        assert objects
        for name, schema in objects.items():
            assert set(schema["required"]) == set(schema["properties"]) - {"override"}, name
