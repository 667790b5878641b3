"""Requests that the data plane sums up count as those that are told of one by one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from router._core import RequestSums, plain_usage
from router.plane.usage import UsageReader
from router.telemetry.settled import CoreRequest, RequestSum, Settled
from tests.router.telemetry.test_request_observer import Observed

PATH, POLICY = "/v1/completions", "prefix"
COUNTS = st.integers(0, 300)
SECONDS = st.sampled_from([0.0, 0.00005, 0.001, 0.0025, 0.02, 0.5, 7.0, 1000.0])
DETAILS = st.none() | st.fixed_dictionaries({}, optional={"cached_tokens": st.none() | COUNTS})
USAGES = st.none() | st.fixed_dictionaries(
    {}, optional={"prompt_tokens": st.none() | COUNTS, "prompt_tokens_details": DETAILS}
)
SERVED = st.tuples(
    st.sampled_from(["a", "b", "removed since"]),
    st.tuples(COUNTS, COUNTS, COUNTS),
    st.tuples(SECONDS, SECONDS.filter(bool), SECONDS),
    USAGES,
    st.booleans(),
)


def settled(
    replica: str,
    tokens: tuple[int, int, int],
    seconds: tuple[float, float, float],
    body: bytes,
    is_comparable: bool,
) -> Settled:
    prompt, cached, expected = tokens
    routing_s, first_byte_s, whole_s = seconds
    return Settled(
        *("m", replica, "id", ("127.0.0.1", 1), None, (prompt, cached, cached, expected), False),
        None,
        CoreRequest(0, False, is_comparable, False, False, None),
        *(False, 0.0, routing_s, first_byte_s, "completed", 200, whole_s, 10, None, 0),
        *(True, body, b""),
    )


@given(st.lists(SERVED, max_size=40))
def test_they_count_the_same(served: list[Any]) -> None:
    """In metrics and in the totals of the last minute; only the log shows some of them."""
    asyncio.run(_count_both(served))


async def _count_both(served: list[Any]) -> None:
    one_by_one, summed_up = Observed(), Observed()
    metrics = one_by_one.observers.metrics
    sums = RequestSums(
        metrics.routing.buckets,
        metrics.first_byte.buckets,
        metrics.total.buckets,
        metrics.prediction_error.buckets,
    )
    for each in (one_by_one, summed_up):
        for name in ("a", "b"):
            each.add(name)
            each.observers.reporting.add(name)  # vLLM leaves a zero out
    for number, (replica, tokens, seconds, usage, is_comparable) in enumerate(served):
        body = json.dumps({"id": "x", "usage": usage}).encode()
        one = settled(replica, tokens, seconds, body, is_comparable)
        one_by_one.observers.settle(number, one, PATH, POLICY)
        found = plain_usage(True, body, b"") if is_comparable else None
        sums.add("m", replica, tokens, seconds, found)
    for _, _, *what in sums.take():
        summed_up.observers.add(RequestSum.of_core(what), POLICY)
    assert sums.take() == []
    logs = [each.observers.log for each in (one_by_one, summed_up)]
    assert logs[0].totals.total().requests == logs[1].totals.total().requests == len(served)
    assert logs[0].totals.total() == logs[1].totals.total()
    assert _rounded(one_by_one) == _rounded(summed_up)
    for each in (one_by_one, summed_up):
        await each.registry.close()
        each.models.close()
        each.large_work.close()


def _rounded(observed: Observed) -> dict[str, float]:
    """All series; sums of seconds may differ in their last digits."""
    lines = generate_latest(observed.metrics).decode().splitlines()
    series = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: round(float(value), 6) for name, value in series if "_created" not in name}


NAMES = (
    *("usage", "prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens"),
    *("input_tokens", "output_tokens", "cache_read_input_tokens", "input_tokens_details"),
    *("message", "response", "id", "é", 'a"b'),
)
SCALARS = st.none() | st.booleans() | st.integers(-5, 1 << 45) | st.floats(allow_nan=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.sampled_from(["x", '"usage"', "\\", "é", "{"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(VALUES, st.booleans(), st.booleans(), st.integers(0, 400))
def test_what_an_engine_reported_is_read_alike(
    value: Any, is_json: bool, is_ascii: bool, cut: int
) -> None:
    """Wherever the core reads it at all; it leaves to Python what is not plain."""
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    for body in (text, text[:cut], b'{"usage": %b}' % text):
        found = plain_usage(is_json, body, b"")
        reader = UsageReader()
        reader.take(is_json, body, b"")
        if found is not None:
            said = reader.usage()
            assert found == (said.prompt_tokens, said.cached_tokens)


def test_the_usual_response_is_read_by_the_core() -> None:
    usage = (
        b'"usage": {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43,'
        b' "prompt_tokens_details": {"audio_tokens": null, "cached_tokens": 32}}'
    )
    body = b'{"id": "c", "choices": [{"message": {"content": "a\\n"}}], ' + usage + b"}"
    assert plain_usage(True, body, b"") == (40, 32)
    assert plain_usage(False, b'{"choices": [], ' + usage + b"}", b"") == (40, 32)
    assert plain_usage(True, b'{"id": "c", "usage": null}', b"") == (None, None)
    assert plain_usage(True, b'{"usage": {"input_tokens": 8}}', b"") is None
    assert plain_usage(False, body, b'{"usage": {}}') is None, "in two parts"
