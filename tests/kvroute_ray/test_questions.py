"""What the router is asked about a call of Ray, what its replicas are called, and which options are
refused."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, fields
from typing import Any

import pytest
from pydantic import BaseModel

from kvroute_ray.names import deployment_prefix, replica_name
from kvroute_ray.options import RoutingOptions, key_of, router_kwargs
from kvroute_ray.outcomes import CallRefused
from kvroute_ray.questions import MOST_NAMES, prompt_of, question
from router.client import SelectionError
from router.config.replica import ReplicaConfig
from router.errors import BadRequest, BodyTooLarge, KeyLimitReached, ModelNotAllowed, QueueFull
from tests.support.warm_start import ROOT

PROMPT = {"model": "gemma", "prompt": [1, 2]}


class Completion(BaseModel):
    """As Ray's own engines take requests."""

    model: str
    prompt: list[int] | str
    max_tokens: int | None = None
    suffix: str | None = None


@dataclass(frozen=True)
class Deployment:
    name: str
    app_name: str


@dataclass(frozen=True)
class Replica:
    unique_id: str
    deployment_id: Deployment


def test_the_first_argument_with_a_prompt_is_the_request() -> None:
    """Deployments take what they like beside it."""
    found = prompt_of(["/v1/completions", {"stream": True}, PROMPT, {"prompt": "x"}], {})
    assert found is not None
    assert (found.place, found.fields) == (2, PROMPT)
    by_name = prompt_of([], {"path": "/", "body": PROMPT})
    assert by_name is not None
    assert by_name.place == "body"
    for args in ([], ["a prompt"], [{"prompt": None}], [[1, 2, 3]], [object()]):
        assert prompt_of(args, {}) is None


def test_a_model_is_asked_about_as_it_would_be_sent() -> None:
    """What a client left out is not part of the question."""
    found = prompt_of([Completion(model="gemma", prompt=[1, 2])], {})
    assert found is not None
    assert found.fields == PROMPT
    changed = found.with_fields({"suffix": "s"})
    assert (changed.suffix, found.argument.suffix) == ("s", None)


def test_a_copy_gets_the_routers_fields() -> None:
    """The argument belongs to whoever made the call."""
    found = prompt_of([PROMPT], {})
    assert found is not None
    assert found.with_fields({"cache_salt": "s"}) == {**PROMPT, "cache_salt": "s"}
    assert "cache_salt" not in PROMPT


def test_a_client_cannot_answer_the_question() -> None:
    """Its body may hold anything."""
    own = {"selection_id": "mine", "replicas": ["a"], "avoid": ["b"], "allowed_worker_ids": [1]}
    more = {"dp_rank": 3, "replica": "a", "worker_id": 1, "endpoint": "/v1/messages"}
    assert question({**PROMPT, **own, **more}, "name") == {**PROMPT, "selection_id": "name"}


def test_a_question_names_what_the_deployment_says() -> None:
    """A request need not name its model, nor show its form."""
    asked = question(PROMPT | {"model_name": "x"}, "name", "base", "/v1/messages", ["a"], ["b"])
    assert asked == {
        **{"prompt": [1, 2], "model": "base", "selection_id": "name"},
        **{"endpoint": "/v1/messages", "replicas": ["a"], "avoid": ["b"]},
    }
    many = [str(number) for number in range(MOST_NAMES + 1)]
    assert len(question(PROMPT, "name", only=many)["replicas"]) == MOST_NAMES


@pytest.mark.parametrize("name", ["Engine", "a b#/c", "ü" * 300])
def test_a_replica_has_a_name_that_the_router_takes(name: str) -> None:
    """Ray allows more in names than a path of HTTP does."""
    deployment = Deployment(name, name)
    found = replica_name(Replica("abcd1234", deployment))
    assert found == deployment_prefix(deployment) + "abcd1234"
    ReplicaConfig.model_validate({"url": "http://10.0.0.1:8000", "id": found})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"url": "router:8000"}, "url: 'router:8000' must be http"),
        ({"url": "http://router:99999"}, "url: "),
        ({"url": "http://user:secret@router:8000"}, "url: "),
        ({"url": "http://router:8000/v1"}, "url: "),
        ({"timeout_s": 0}, "timeout_s: 0 must be a number over 0"),
        ({"timeout_s": "5"}, "timeout_s: '5' must"),
        ({"pause_s": float("nan")}, "pause_s: nan must"),
        ({"booking_argument": "a-b"}, "booking_argument: 'a-b' must be the name of an argument"),
    ],
)
def test_a_wrong_option_is_refused_by_name_and_rule(options: dict[str, Any], rule: str) -> None:
    """Where the application is built: in the process of a handle nobody would see it."""
    with pytest.raises(ValueError, match=rule):
        router_kwargs(**{"url": "http://router:8000", **options})


def test_options_are_what_the_request_router_takes() -> None:
    """They pass through Ray as plain data."""
    kwargs = router_kwargs("http://router:8000", model="gemma")
    assert RoutingOptions(**kwargs) == RoutingOptions("http://router:8000", model="gemma")
    with pytest.raises(TypeError):
        router_kwargs("http://router:8000", modell="gemma")


def test_a_key_that_is_named_must_be_there() -> None:
    """Without it every question would be refused."""
    assert key_of(None, {}) is None
    assert key_of("KEY", {"KEY": "k"}) == "k"
    with pytest.raises(ValueError, match="KEY must be set"):
        key_of("KEY", {})


def test_refusals_pass_from_process_to_process() -> None:
    """Ray pickles what a replica raises."""
    for kind in (CallRefused, SelectionError):
        found = pickle.loads(pickle.dumps(kind(429, "queue_full", "full", 2.0)))
        assert (found.status, found.code, found.retry_after_s) == (429, "queue_full", 2.0)
        assert str(found) == "full"


def test_what_is_refused_of_a_call_has_the_routers_codes() -> None:
    """A code that changes its name would let refused calls through."""
    errors = (BadRequest, BodyTooLarge, KeyLimitReached, ModelNotAllowed, QueueFull)
    assert {each.code for each in errors} <= CallRefused.CODES


def test_the_guide_has_every_option_and_its_python_is_python() -> None:
    """It is the only list of them."""
    text = (ROOT / "docs/ray.md").read_text(encoding="utf-8")
    table = re.search(r"^\| Option .*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert table
    rows = re.findall(r"^\| `(\w+)` \| *(.*?) *\|", table[0], re.MULTILINE)
    assert [name for name, _ in rows] == [each.name for each in fields(RoutingOptions)]
    numbers = {name: float(shown) for name, shown in rows if shown.isdigit()}
    assert numbers == {"timeout_s": RoutingOptions.timeout_s, "pause_s": RoutingOptions.pause_s}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "docs/ray.md", "exec")
