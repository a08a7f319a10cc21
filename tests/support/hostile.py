"""Texts that a malicious user could write to a VM's fields."""

import json


HOSTILE = {
    "megabyte": "x" * 2**20,
    "escapes": "\x1b" * 2**17,
    "control": "one\x00two\x07three\r\nfour\x7f\x9b31m",
    "ansi": "\x1b[2J\x1b]0;title\x07\x1b[31mred",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;'\"",
    "right-to-left": "safe \u202egnp.exe\u202c \u2066x\u2069 \u200f\u061c",
    "invisible": "\u200b\ufeff\u2028\u2029\U000e0041",
    "half-a-pair": "one\ud800two\udc00",
    "template": "{{ 7 * 7 }} ${x} %s {0}",
    "markup": "[bold red]rich[/] [link=http://x]y[/link]",
}
"""Malicious texts, by what they could do."""


def hostile_json(value: object) -> bytes:
    """Encode as JSON, with lone surrogates as escapes, and with broken UTF-8 for "BROKEN-UTF-8"."""
    return json.dumps(value).encode().replace(b"BROKEN-UTF-8", b"\xff\xfe\xc3")
