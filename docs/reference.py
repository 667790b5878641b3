"""Writes the tables of options and of metrics in the documents, from the configuration's models and
from the metrics of a router. `make reference` runs it; `--check` says what it would change.

A table stands between two comments, of which the first names it:

    <!-- options of server.tls -->     the fields of a section
    <!-- all metrics -->               what a router without replicas exports, by subject
    <!-- end -->

`examples/kvroute.yaml` gets a line for each option that it lacks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le, MaxLen
from prometheus_client.metrics_core import Metric
from pydantic.fields import FieldInfo

from kvevents.field_docs import field_docs
from router.config import discovery, models, routing, sharing, values
from router.config.schema import RouterConfig
from router.policies import types as scoring
from router.policies.policies import BUILT_IN
from router.serve.server import render_metrics
from router.serve.service import RouterService

DOCS = Path(__file__).parent
_EXAMPLE = DOCS.parent / "examples/kvroute.yaml"
_TABLE = re.compile(r"(<!-- (options of|all) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CONDITION = "Change it when "

_NAMED = {
    models: {"TokenizerPath": "path"},
    values: {
        "Seconds": "seconds",
        "Count": "count",
        "Bytes": "bytes",
        "Tokens": "tokens",
        "DrafterGroups": "flag, or list of numbers",
        "TokenCount": "1 to 2^40",
        "Window": "tokens",
        "Name": "name",
        "FilePath": "path",
        "PlacedPath": "path",
        "UrlPath": "path",
        "ProxiedPathPattern": "path",
        "Url": "URL",
        "ZmqAddress": "`tcp://host:port`, `ipc://path`",
        "EventAddress": "`tcp://host:port`, `ipc://path`, `http://host:port/path`, `listen`",
        "Network": "network",
        "HostName": "name",
        "PeerHost": "name or address",
        "CurvePublicKey": "40 characters",
        "KeyName": "1 to 64 of `A-Za-z0-9_.-`",
        "HeaderName": "header name, lower case",
        "ReplicaId": "1 to 128 of `A-Za-z0-9_.:-`",
        "Secret": "key",
    },
    sharing: {
        "BoardUrl": "`redis://`, `rediss://`, `valkey://` or `valkeys://`, host, port, number of "
        "the database",
        "Prefix": "1 to 64 of `A-Za-z0-9_.:-`",
    },
    discovery: {
        "DnsName": "DNS name",
        "NameServer": "address, or `address#port`",
        "KubernetesName": "name",
        "LabelSelector": "label selector",
        "IdPrefix": "up to 64 of `A-Za-z0-9_.:-`",
        "PortName": "a port's name",
    },
    routing: {
        "PolicyName": ", ".join(f"`{name}`" for name in BUILT_IN) + ", or a plug-in's name",
    },
    scoring: {"Cost": "cost", "Share": "share"},
}
"""The documents' words for the types that have a name, by the module that names them."""

_SUBJECTS = (
    (
        "Requests",
        r"(proxied_)?request|wrong_|versioned_|rejected_|retries|unretried_|second_attempts|time_to_first",
    ),
    ("Predictions", r"predict|admission_|expected_|actual_|compared_|approximate_"),
    ("Queues and limits", r"queue_|key_|reservation"),
    ("Index", r"index_|blocks_|stored_responses|response_lookups|recent_|mirror_"),
    ("What replicas are told to keep", r"boundar"),
    ("Event streams", r"source_|suspect_|event_batches|event_polls|events_|listen_"),
    ("Replicas", r"replica_|health_|prefill_|cache_pressure|engine_|in_flight_"),
    ("Where replicas come from", r"discovery_|config_reloads"),
    ("Tokenisation", r"tokeniz|token_cache_|untokenized_"),
    ("Other routers, and starts", r"board_|snapshot"),
    ("The process", r"routing_|event_loop_|buffered_|upstream_|shortages|traces|stripped_"),
)
"""Headings of the metrics' table; by what follows `kvroute_`."""

_SEE = {
    "kvroute_prefill_backlog_seconds": "[scaling the engines](deployment.md#scaling-the-engines)",
    "kvroute_source_rebuilds": "[self-repair](#self-repair)",
    "kvroute_tokenizer_info": "[tokenizers](#tokenizers)",
}


# --- options --------------------------------------------------------------------------------------


def section_at(path: str) -> Any:
    """Return the model behind a path as `server.tls` or `models[].layout`."""
    kind: Any = RouterConfig
    for name in path.replace("[]", "").split("."):
        kind = _section_in(_fields(kind)[name].annotation)
    return kind


def _fields(section: Any) -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = section.__pydantic_fields__
    return found


def _section_in(kind: Any) -> Any:
    if hasattr(kind, "__pydantic_fields__"):
        return kind
    return next((found for each in get_args(kind) if (found := _section_in(each))), None)


def options(path: str) -> Iterator[str]:
    """Yield the table of a section, line by line."""
    section = section_at(path)
    hints = get_type_hints(section, include_extras=True)
    docs = field_docs(section)
    yield "| Option | Type | Default | Change it when |"
    yield "|---|---|---|---|"
    for name, field in _fields(section).items():
        inner = _section_in(field.annotation)
        if inner is not None and not _is_list(hints[name]):
            continue  # a table of its own
        cells = (
            f"`{name}`",
            _type(hints[name], name),
            _default(field),
            _condition(docs.get(name, "")),
        )
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _condition(docstring: str) -> str:
    """Return the last paragraph of a field's docstring, which says when to change it."""
    return docstring.rpartition("\n\n")[2].removeprefix(_CONDITION).removesuffix(".")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, dict) and default:
        return f"`{{{', '.join(f'{key}: {value}' for key, value in default.items())}}}`"
    if isinstance(default, str) and default:
        return f"`{default}`"
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"`{json.dumps(default)}`"


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is tuple or any(map(_is_list, get_args(kind)))


def _type(kind: Any, name: str) -> str:
    """Return the table's word for a type.

    Args:
        kind: With its `Annotated` parts.
        name: Of the option; its ending is the unit.
    """
    for module, names in _NAMED.items():
        for alias, text in names.items():
            if kind is getattr(module, alias):
                return text
    if get_origin(kind) in (Union, types.UnionType):
        return ", or ".join(_type(each, name) for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Annotated:
        inner, *rules = get_args(kind)
        return _bounded(inner, rules, name)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if _section_in(kind) is not None:
        return "list, below"
    if get_origin(kind) is tuple:
        each = _type(get_args(kind)[0], name)
        return f"list of {each}s" if each.isalpha() else f"list of strings, {each}"
    return {bool: "flag", str: "string"}.get(kind, "mapping")


def _bounded(inner: Any, rules: list[Any], name: str) -> str:
    """Return an `Annotated` without a name: its bounds, and its unit."""
    found = [each for rule in rules for each in getattr(rule, "metadata", ())]
    least = next((rule.ge for rule in found if isinstance(rule, Ge)), None)
    most = next((rule.le for rule in found if isinstance(rule, Le)), None)
    if least is not None and most is not None:
        return f"{least} to {_number(most)}" + " seconds" * (
            name.endswith("_s") and "_per_" not in name
        )
    length = next((rule.max_length for rule in found if isinstance(rule, MaxLen)), None)
    if inner is str:
        return "string" if length is None else f"up to {length} characters"
    return _type(inner, name)


def _number(value: Any) -> str:
    is_power = isinstance(value, int) and value >= 2**20 and value & (value - 1) == 0
    return f"2^{value.bit_length() - 1}" if is_power else f"{value:,}"


# --- metrics --------------------------------------------------------------------------------------


def metrics(_: str) -> Iterator[str]:
    """Yield the table of all metrics, line by line."""
    families = asyncio.run(_families())
    yield "| Metric | Labels | Meaning |"
    yield "|---|---|---|"
    for subject, beginning in _SUBJECTS:
        yield f"| **{subject}** | | |"
        named = re.compile(f"kvroute_({beginning})")
        for family in [family for family in families if named.match(family.name)]:
            families.remove(family)
            yield _metric(family)
    if families:
        names = ", ".join(family.name for family in families)
        sys.exit(f"no heading for {names}: add its beginning to _SUBJECTS in docs/reference.py")


def _metric(family: Metric) -> str:
    name = family.name + "_total" * (family.type == "counter")
    labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
    text = family.documentation.removesuffix(".")
    if family.name in _SEE:
        text += f": see {_SEE[family.name]}"
    return f"| `{name}` | {labels} | {text} |".replace("|  |", "| |")


async def _families() -> list[Metric]:
    service = RouterService(RouterConfig())
    async with service.lifespan():
        await render_metrics(service)
        return list(service.metrics.families())


# --- the example ----------------------------------------------------------------------------------


def completed(text: str) -> str:
    """Return the example configuration with a line for each option that it lacks, at its default
    and behind the one that is declared before it. Sections in lists are left as they are."""
    lines = text.splitlines()
    for path, section in _sections(RouterConfig, ()):
        _complete(lines, path, section)
    return "\n".join([*lines, ""])


def _sections(section: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, section
    for name, kind in get_type_hints(section, include_extras=True).items():
        if name in _fields(section) and _section_in(kind) is not None and not _is_list(kind):
            yield from _sections(_section_in(kind), (*path, name))


def _complete(lines: list[str], path: tuple[str, ...], section: Any) -> None:
    start, end = 0, len(lines)
    for depth, name in enumerate(path):
        found = _place(lines, name, depth, start, end)
        if found is None:
            return
        start, end = found + 1, _end(lines, found, depth)
    behind, depth = start, len(path)
    for name, field in _fields(section).items():
        found = _place(lines, name, depth, start, end)
        is_option = _section_in(field.annotation) is None and not field.is_required()
        if found is None and is_option:
            lines.insert(behind, f"{'  ' * depth}{name}: {_default(field).strip('`')}")
            found, end = behind, end + 1
        behind = behind if found is None else _end(lines, found, depth)


def _place(lines: list[str], name: str, depth: int, start: int, end: int) -> int | None:
    """Return the line of an option in its section; None where it has none."""
    beginning = f"{'  ' * depth}{name}:"
    return next((at for at in range(start, end) if lines[at].startswith(beginning)), None)


def _end(lines: list[str], at: int, depth: int) -> int:
    """Return the line behind what belongs to the option in line *at*."""
    deeper = "  " * (depth + 1)
    while at + 1 < len(lines) and lines[at + 1].startswith(deeper):
        at += 1
    return at + 1


# --- documents ------------------------------------------------------------------------------------


def rewritten(text: str) -> str:
    """Return a document with its tables as they should be."""

    def table(found: re.Match[str]) -> str:
        rows = options(found[3]) if found[2] == "options of" else metrics(found[3])
        return "".join([found[1], *(f"{row}\n" for row in ("", *rows, "")), found[4]])

    return _TABLE.sub(table, text)


def main() -> int:
    """Write the tables and the example, or with `--check` only say which documents differ."""
    parser = argparse.ArgumentParser(description="Writes the tables of options and metrics.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    is_checking = parser.parse_args().check
    old = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    new = {path: rewritten(text) for path, text in old.items()}
    old[_EXAMPLE] = _EXAMPLE.read_text(encoding="utf-8")
    new[_EXAMPLE] = completed(old[_EXAMPLE])
    changed = [path for path in old if new[path] != old[path]]
    for path in changed:
        place = path.relative_to(DOCS.parent)
        print(f"{place}: not as in the code; make reference" if is_checking else f"{place} written")
        if not is_checking:
            path.write_text(new[path], encoding="utf-8")
    return bool(changed and is_checking)


if __name__ == "__main__":
    sys.exit(main())
