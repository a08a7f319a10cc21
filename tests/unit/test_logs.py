"""The log and its formats."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from exporter.logs import Throttle, configure_logging


TOKEN = "s3cret-token"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore the logging after the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    before = structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Always true."""
        return True


def configured(form: str | None = "json", level: str = "info") -> io.StringIO:
    """Configure the log to write to a new stream, and return the stream."""
    stream = io.StringIO()
    configure_logging(form=form, level=level, stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """The JSON objects that were logged, one per line."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(token: str) -> None:
    """Raise an error, with a secret in a local variable."""
    secret = token
    raise RuntimeError(f"it failed after {len(secret)} letters")


def test_json_is_one_object_per_line() -> None:
    """Every line is a JSON object with event, level and time, for any logged values."""
    stream = configured()
    log = structlog.stdlib.get_logger()
    log.info("migration_began", name="db1\n\x1b[31m", nodes=("n1",), odd={1})
    (line,) = lines(stream)

    assert line["event"] == "migration_began"
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")
    assert line["name"] == "db1\n\x1b[31m"
    assert line["nodes"] == ["n1"]


def test_libraries_are_logged_alike() -> None:
    """Log lines of libraries have the same form."""
    stream = configured()
    logging.getLogger("some.library").warning("%s of %d", "one", 2, extra={"more": 3})
    (line,) = lines(stream)

    assert (line["event"], line["level"], line["more"]) == ("one of 2", "warning", 3)


@pytest.mark.parametrize("logger", [logging.getLogger("some.library"), None], ids=["other", "own"])
@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_variables(form: str, logger: logging.Logger | None) -> None:
    """A traceback has lines of code but no values of variables, so it has no token."""
    stream = configured(form)
    try:
        fail(TOKEN)
    except RuntimeError:
        (logger or structlog.stdlib.get_logger()).exception("failed")
    text = stream.getvalue() if form == "console" else lines(stream)[0]["exception"]

    assert "it failed after 12 letters" in text
    assert TOKEN not in stream.getvalue()


@pytest.mark.parametrize(
    "value", ["\x1b[2J", "a\nfake line", "a\rb", "\x07", "\u202e", "a\x00b"], ids=ascii
)
def test_the_console_shows_text_as_text(value: str) -> None:
    """Control characters in the values are escaped on the console."""
    stream = configured("console")
    structlog.stdlib.get_logger().info("eviction_blocked", pod=value)

    assert value not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1
    assert ascii(value)[1:-1] in stream.getvalue().replace(r"\\", "\\")


@pytest.mark.parametrize(
    ("form", "stream", "is_json"),
    [
        pytest.param("json", Terminal(), True, id="json-on-a-terminal"),
        pytest.param("console", io.StringIO(), False, id="console-in-a-pipe"),
        pytest.param(None, Terminal(), False, id="chosen-for-a-terminal"),
        pytest.param(None, io.StringIO(), True, id="chosen-for-a-pipe"),
    ],
)
def test_the_form_is_chosen(form: str | None, stream: io.StringIO, is_json: bool) -> None:
    """By default the log is formatted for people on a terminal, and is JSON elsewhere."""
    configure_logging(form=form, level="info", stream=stream)
    structlog.stdlib.get_logger().info("started")

    assert stream.getvalue().startswith("{") is is_json
    assert ("\x1b[" in stream.getvalue()) is (not is_json and stream.isatty())


@pytest.mark.parametrize(
    ("level", "logged"),
    [
        pytest.param("debug", ["debug", "info", "warning", "error"], id="debug"),
        pytest.param("info", ["info", "warning", "error"], id="info"),
        pytest.param("warning", ["warning", "error"], id="warning"),
        pytest.param("error", ["error"], id="error"),
    ],
)
def test_the_level_is_chosen(level: str, logged: list[str]) -> None:
    """Neither our code nor a library logs anything below the level."""
    stream = configured(level=level)
    for logger in (structlog.stdlib.get_logger(), logging.getLogger("some.library")):
        for name in ("debug", "info", "warning", "error"):
            getattr(logger, name)("event")

    assert [line["level"] for line in lines(stream)] == logged * 2


def test_chatty_libraries_keep_their_requests_to_themselves() -> None:
    """Even at level debug the Kubernetes client does not log requests and answers."""
    stream = configured(level="debug")
    logging.getLogger("kubernetes_asyncio.client.rest").debug("response body: s3cret")

    assert stream.getvalue() == ""


def test_a_clock_that_was_ahead_silences_nothing() -> None:
    """If the clock is set back, the next line is logged, and then lines are throttled as before."""
    throttle = Throttle(2)
    assert throttle.lets_through("vm", 86_400.0)
    assert throttle.lets_through("vm", 10.0)
    assert not throttle.lets_through("vm", 20.0)
    assert throttle.lets_through("vm", 70.0)
