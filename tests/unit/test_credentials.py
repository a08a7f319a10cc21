"""The token, the CA and the client certificate of an HTTP client."""

import ssl
from pathlib import Path

import pytest

from exporter.credentials import (
    CannotAsk,
    InvalidEndpoint,
    check_url,
    describe,
    make_ssl_context,
    read_token,
)
from tests.support.certificates import write_certificate


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        pytest.param("https://there", True, id="tls"),
        pytest.param("http://localhost:9090/prometheus", True, id="localhost"),
        pytest.param("http://127.8.9.1", True, id="loopback"),
        pytest.param("http://[::1]:9090", True, id="loopback-6"),
        pytest.param("http://10.0.0.1", False, id="another-address"),
        pytest.param("http://localhost.example", False, id="looks-like-localhost"),
    ],
)
def test_a_token_goes_where_nobody_can_listen(url: str, *, sent: bool) -> None:
    """A token is sent only over TLS or to this machine; without a token any URL is allowed."""
    check_url(url, "expected", with_token=False)
    if sent:
        check_url(url, "expected", with_token=True)
    else:
        with pytest.raises(InvalidEndpoint, match=f"{url}: a token is only sent over https"):
            check_url(url, "expected", with_token=True)


@pytest.mark.parametrize("url", ["there", "ftp://there", "http://", "http://[", "http://a?b", ""])
def test_what_is_no_address_is_told_with_what_is_expected(url: str) -> None:
    """The error for an invalid URL says what was expected."""
    with pytest.raises(InvalidEndpoint) as refused:
        check_url(url, "expected a URL", with_token=False)

    assert str(refused.value).startswith(f"{url}: ")
    assert str(refused.value).endswith("expected a URL")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@there",
        "http://:secret@there",
        "http://secret@there",
        "ftp://me:secret@there",
        "http://me:secret@there:port",
        "http://me:sec/secret@there",
        "http://[me:secret@there",
        "me:secret@there",
    ],
)
def test_a_password_is_never_repeated(url: str) -> None:
    """An error never repeats a password that is in the URL."""
    with pytest.raises(InvalidEndpoint, match="give a token with --token-file") as refused:
        check_url(url, "expected a URL", with_token=False)

    assert "secret" not in str(refused.value)


def test_a_token_is_the_file_without_its_line_s_end(tmp_path: Path) -> None:
    """The token is the file's content without the line end; without a file there is no header."""
    file = tmp_path / "token"
    file.write_text("abc\n")

    assert read_token(file) == {"Authorization": "Bearer abc"}
    assert read_token(None) == {}


@pytest.mark.parametrize("content", [b"", b"two words", b"a\r\nX-Evil: 1", b"a\x7f"])
def test_what_holds_no_token_is_sent_nowhere(tmp_path: Path, content: bytes) -> None:
    """A file without a valid token is an error."""
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(CannotAsk, match=f"--token-file {file} contains no token"):
        read_token(file)


def test_trust_is_the_system_s_unless_a_file_says_otherwise(tmp_path: Path) -> None:
    """The system's CAs are trusted unless a CA file is given."""
    write_certificate(tmp_path, "one")
    pair = (tmp_path / "one.crt", tmp_path / "one.key")

    assert make_ssl_context(None) is True
    assert isinstance(make_ssl_context(tmp_path / "one.crt"), ssl.SSLContext)
    assert isinstance(make_ssl_context(None, *pair), ssl.SSLContext)


@pytest.mark.parametrize(
    ("content", "text"), [(None, "cannot be read: No such file"), ("words", "not PEM")]
)
def test_a_file_that_is_no_authority_is_told(
    tmp_path: Path, content: str | None, text: str
) -> None:
    """The error for an invalid CA file names its option."""
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CannotAsk, match=f"--ca-file {file}: {text}"):
        make_ssl_context(file)


def test_an_error_is_told_in_words() -> None:
    """The text of an error is the system's message, the exception's message, or its type."""
    assert describe(OSError(2, "No such file")) == "No such file"
    assert describe(ValueError("odd")) == "odd"
    assert describe(TimeoutError()) == "TimeoutError"
