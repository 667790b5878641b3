r"""Fields of statistics, described once: the string under a field describes it, wherever it is
shown, and its annotation names its metric.

    gaps: Annotated[int, counter("kvroute_events_gaps")] = 0
    \"\"\"Gaps seen in the sequence numbers.\"\"\"
    blocks: Annotated[dict[tuple[int, str], int], gauge("kvroute_index_blocks", "group", "tier")]
    \"\"\"Distinct blocks held.\"\"\"

A mapping has a series for each of its keys, which are the values of the labels named. A reader that
exports metrics reads both with `metrics_of`; documents of interfaces read `field_docs`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import get_type_hints


class MetricKind(Enum):
    """How a field's value becomes a metric's."""

    COUNTER = "counter"
    """A count since the start."""
    GAUGE = "gauge"
    """A number that rises and falls."""
    FLAG = "flag"
    """1 where the field is true or not empty, else 0."""
    HISTOGRAM = "histogram"
    """Measurements, counted by bucket."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Marks a field that is a metric."""

    kind: MetricKind
    name: str
    labels: tuple[str, ...] = ()
    """The labels whose values are the keys of a mapping."""
    help: str = ""
    """Empty: the string under the field."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets but the last one."""


def counter(name: str, *labels: str) -> Exported:
    """Mark a field as a counter, a mapping's by *labels*; exporters add `_total` to *name*."""
    return Exported(MetricKind.COUNTER, name, labels)


def gauge(name: str, *labels: str) -> Exported:
    """Mark a field as a gauge, a mapping's by *labels*."""
    return Exported(MetricKind.GAUGE, name, labels)


def flag(name: str, help: str) -> Exported:
    """Mark a field as a gauge that is 1 where the field is true or not empty, else 0."""
    return Exported(MetricKind.FLAG, name, help=help)


def histogram(name: str, *labels: str, buckets: tuple[float, ...]) -> Exported:
    """Mark a field as a histogram, by *labels*, with the upper bounds of its *buckets*."""
    return Exported(MetricKind.HISTOGRAM, name, labels, buckets=buckets)


def metrics_of(owner: type) -> Mapping[str, Exported]:
    """The metrics among the fields of a class and its bases, by field, in their order; each with
    its help."""
    return _metrics_of(owner)


@functools.cache
def _metrics_of(owner: type) -> Mapping[str, Exported]:
    docs = field_docs(owner)
    return {
        field: metric if metric.help else replace(metric, help=docs[field])
        for field, hint in get_type_hints(owner, include_extras=True).items()
        for metric in getattr(hint, "__metadata__", ())
        if isinstance(metric, Exported)
    }


def field_docs(owner: type) -> dict[str, str]:
    """The string under each field of a class and its bases, each paragraph on one line."""
    docs: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        docs |= _docs_in_module(each.__module__).get(each.__name__, {})
    return docs


@functools.cache
def _docs_in_module(name: str) -> Mapping[str, dict[str, str]]:
    """Return the strings under the fields of each class of one of our modules, by class."""
    if name.partition(".")[0] not in ("kvevents", "offload", "router"):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: dict(_documented_fields(node.body)) for node in classes}


def _documented_fields(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                yield name, "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))
