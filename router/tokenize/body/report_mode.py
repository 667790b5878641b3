"""Taking `kv_cache_report_mode` out of a body before it is sent on.

Any client can send `vllm_xargs: {"kv_cache_report_mode": "full"}`. The engine then announces
every block of a hit again, even blocks that do not exist, which corrupts the index's counts for
all clients.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from router.tokenize.body.json_fields import encode_json
from router.tokenize.errors import RequestBodyError
from router.tokenize.prompts import PromptSpec

ARGUMENTS_FIELD = "vllm_xargs"
_REPORT_MODE = "kv_cache_report_mode"

# The key in plain letters, or an escape that could spell one of its letters: a-z are U+0061 to
# U+007A, _ is U+005F. Text outside ASCII is escaped with other numbers, so that bodies full of it
# do not come this way.
_SUSPICIOUS = re.compile(rb"kv_cache_report_mode|\\u00(?:[67][0-9a-fA-F]|5[fF])")

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Pairs(list[tuple[str, Any]]):
    """An object as its pairs in order, so that repeated names stay visible; a JSON list is a plain
    list."""


def strip_report_mode(body: bytes, spec: PromptSpec) -> bytes:
    """Return the body without the report mode; the same object if it has none.

    Otherwise all other fields keep their bytes, except that repeated names collapse to their last
    value, the one that the engine's own parser uses.

    Args:
        body: The JSON body that *spec* was parsed from.
        spec: What `parse_request` made of it.
    """
    if not spec.has_engine_arguments or not _SUSPICIOUS.search(body):
        return body
    if not any(_asks_for_report_mode(arguments) for arguments in _occurrences(body)):
        return body
    return _without_report_mode(body)


def _occurrences(body: bytes) -> list[Any]:
    """Every value of the field in the body, including those that a later one overrides."""
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs)
    except RecursionError:
        raise RequestBodyError("$", "nested too deep", "must be nested less deep") from None
    except ValueError as error:
        # In a field that routing skips; the engine reads it.
        found = "not UTF-8" if isinstance(error, UnicodeError) else "malformed"
        raise RequestBodyError("$", found, "the body must be valid json") from None
    return [value for name, value in pairs if name == ARGUMENTS_FIELD]


def _asks_for_report_mode(arguments: object) -> bool:
    return isinstance(arguments, _Pairs) and any(name == _REPORT_MODE for name, _ in arguments)


def _without_report_mode(body: bytes) -> bytes:
    fields: dict[str, Any] = dict(_RAW_FIELDS.decode(body))
    arguments = bytes(fields[ARGUMENTS_FIELD])
    if arguments.lstrip().startswith(b"{"):
        kept: dict[str, Any] = dict(_RAW_FIELDS.decode(arguments))
        kept.pop(_REPORT_MODE, None)
        fields[ARGUMENTS_FIELD] = kept
    return encode_json(fields)
