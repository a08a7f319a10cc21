"""What msgspec raises for bytes that another program wrote."""

import msgspec


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised for JSON or msgpack with invalid syntax, wrong types or text that is not UTF-8, and for
arrays or objects that are nested too deeply."""
