"""A request's body becomes a decision: model, prompt, ranking, and what is sent where."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest

from kvevents.events import BlockStored, EventBatch
from router.config.models import ModelConfig
from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.errors import (
    BadRequest,
    NoReplica,
    PromptTooLong,
    UnknownModel,
)
from router.fleet.gate import GateOptions
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.types import EventSource, ServedModels
from router.fleet.watchers import Watchers
from router.index.base import SourceId
from router.policies import make_policy
from router.prompt.endpoints import Endpoint
from router.prompt.processes import LargeWork
from router.prompt.prompts import ChatPrompt, TextPrompt
from router.routing.dispatcher import Dispatcher
from router.routing.models import ModelSet
from router.routing.planner import Known, RoutePlanner
from router.routing.question import uncached_tokens
from router.routing.recent_prefixes import RecentPrefixes
from router.routing.stored_responses import StoredResponses
from router.routing.terms import Terms
from tests.support.loads import in_flight

REPORT_MODE = (
    b'{"model": "m", "prompt": [1], "vllm_xargs": {"kv_cache_report_mode": "full", "a": 1}}'
)


class Setting:
    """A dispatcher over a registry whose replicas are never asked."""

    def __init__(self) -> None:
        self.load = load = LoadTracker()
        self.now = 0.0
        health = HealthConfig()
        watchers = Watchers(_no_response, health, load, clock=lambda: self.now)
        self.registry = ReplicaRegistry(watchers, health, load, clock=lambda: self.now)
        self.models = ModelSet([ModelConfig(name="m", lora_adapters=("a",))], _no_tokens)
        self.holders: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str]] = []
        self.responses = StoredResponses(self._has_response)
        planner = RoutePlanner(
            make_policy("prefix"), Known(load, recent=RecentPrefixes(load.books))
        )
        self.large_work = LargeWork()
        self.dispatcher = Dispatcher(
            self.models, self.registry, planner, "prefix", self.responses, self.large_work
        )

    async def _has_response(self, replica: Replica, response_id: str) -> bool:
        self.asked.append((replica.id, response_id))
        return (replica.id, response_id) in self.holders

    def add(self, name: str, ranks: int = 1, **config: object) -> Replica:
        """Add a healthy replica with one event source a rank."""
        number = len(self.registry.replicas()) + 1
        replica = self.registry.add(
            ReplicaConfig(url=f"http://127.0.0.1:{number}", id=name, models=("m",), **config)
        )
        while not replica.is_healthy:
            replica.record.check_passed()
        replica.sources = tuple(
            EventSource(rank, "tcp://127.0.0.1:1", None) for rank in range(ranks)
        )
        return replica


async def _no_response(*_arguments: object) -> tuple[int, bytes]:
    raise ConnectionError


async def _no_tokens(*_arguments: object) -> tuple[int, bytes]:
    raise ConnectionError


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    made = Setting()
    yield made
    await made.registry.close()
    made.models.close()
    made.large_work.close()


async def test_an_attempt_carries_the_replicas_own_headers_and_what_the_client_is_to_see(
    setting: Setting,
) -> None:
    """The engine needs its key, and the client learns where its request went."""
    setting.add("r0", api_key="secret")
    decision = await setting.dispatcher.dispatch(
        Endpoint.COMPLETIONS, b'{"model": "m", "prompt": [1, 2, 3]}'
    )
    (attempt,) = decision.attempts()
    assert attempt.replica_id == "r0"
    assert attempt.request_headers == ((b"authorization", b"Bearer secret"),)
    assert attempt.response_headers == ((b"x-kv-replica", b"r0"), (b"x-kv-hit-tokens", b"0"))
    assert decision.prompt_tokens == 3
    assert decision.model_name == "m"
    assert 0 <= decision.tokenization_s < 60


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, None])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "", "prompt": [1]}',
        b'{"prompt": [1]}',
        b'\xef\xbb\xbf{"model": "m", "prompt": [1]}',
        *(
            '{"model": "m", "prompt": [1]}'.encode(encoding)
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")
        ),
    ],
)
async def test_what_engines_take_is_taken(
    setting: Setting, endpoint: Endpoint | None, body: bytes
) -> None:
    """An empty name stands for the only model, and a byte order mark for nothing. What their JSON
    reader detects is read, and sent in UTF-8."""
    setting.add("r0")
    decision = await setting.dispatcher.dispatch(endpoint, body)
    assert decision.asked.model.name == "m"
    assert decision.asked.body == body.decode(json.detect_encoding(body)).encode()


async def test_a_rank_is_asked_for_where_it_matters(setting: Setting) -> None:
    """The engine balances its ranks better than the router, unless one of them has the prefix or is
    to have it."""
    setting.add("r0", ranks=2)
    short = await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, REPORT_MODE)
    candidate = short.ranked("r0").candidate
    assert (candidate.dp_rank, short.source_of(candidate)) == (None, SourceId("r0", 0))
    assert short.certain_source_of(candidate) is None
    assert next(short.attempts()).request_headers == ()

    ids = list(range(65))
    body = b'{"model": "m", "prompt": %b}' % str(ids).encode()
    decision = await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body)
    candidate = decision.ranked("r0").candidate
    assert candidate.dp_rank in (0, 1)
    assert uncached_tokens(65, candidate) == 65

    blocks = BlockStored([1, 2, 3, 4], None, ids[:64], "GPU", 0)
    setting.models.index_of("m").apply(SourceId("r0", 1), EventBatch(0.0, [blocks]))
    decision = await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body)
    candidate = decision.ranked("r0").candidate
    assert (candidate.dp_rank, decision.source_of(candidate)) == (1, SourceId("r0", 1))
    attempt = next(decision.attempts())
    assert attempt.request_headers == ((b"x-data-parallel-rank", b"1"),)
    assert attempt.response_headers[1] == (b"x-kv-hit-tokens", b"64")
    assert uncached_tokens(65, candidate) == 1
    assert decision.certain_source_of(candidate) == SourceId("r0", 1)
    assert decision.is_comparable_at(candidate)


async def test_where_the_rank_is_not_read_one_ranks_hit_is_neither_promised_nor_compared(
    setting: Setting,
) -> None:
    """The engine may take another rank: 2 of 40 predictions before vLLM 0.32 were wrong for it."""
    setting.add("r0", ranks=2)
    setting.add("r1")
    ids = list(range(65))
    blocks = BlockStored([1, 2, 3, 4], None, ids[:64], "GPU", 0)
    for name in ("r0", "r1"):
        setting.models.index_of("m").apply(SourceId(name, 0), EventBatch(0.0, [blocks]))
    body = b'{"model": "m", "input": %b}' % str(ids).encode()
    decision = await setting.dispatcher.dispatch(Endpoint.EMBEDDINGS, body)
    one_of_two, only = (decision.ranked(name).candidate for name in ("r0", "r1"))
    assert (one_of_two.cached_tokens, only.cached_tokens) == (0, 64)
    assert (decision.is_comparable_at(one_of_two), decision.is_comparable_at(only)) == (False, True)
    assert decision.certain_source_of(one_of_two) is None
    assert decision.certain_source_of(only) == SourceId("r1", 0)


async def test_the_rank_that_a_client_may_ask_for_is_the_one_it_gets(setting: Setting) -> None:
    """Its hit is predicted for that rank, and the header says so once."""
    setting.add("r0", ranks=4)
    body = b'{"model": "m", "prompt": [1]}'
    decision = await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body, Terms(dp_rank=3))
    assert next(decision.attempts()).request_headers == ((b"x-data-parallel-rank", b"3"),)


async def test_two_models_with_equal_hashes_do_not_mix(setting: Setting) -> None:
    """An engine's hash holds neither model nor group, so the same prompt has the same hashes in
    both; what one model's replica holds says nothing of the other's."""
    setting.add("r0")
    setting.models.discover("other")
    other = setting.registry.add(
        ReplicaConfig(url="http://127.0.0.1:99", id="r1", models=("other",))
    )
    other.record.check_passed()
    ids = list(range(65))
    for model, tokens in (("m", 64), ("other", 16)):
        for name in ("r0", "r1"):
            blocks = BlockStored([*range(tokens // 16)], None, ids[:tokens], "GPU", 0)
            setting.models.index_of(model).apply(SourceId(name, 0), EventBatch(0.0, [blocks]))
    for model, name, hit in (("m", "r0", 64), ("other", "r1", 16)):
        body = b'{"model": "%b", "prompt": %b}' % (model.encode(), str(ids).encode())
        decision = await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body)
        (ranked,) = decision.ranking
        assert (ranked.candidate.replica_id, ranked.candidate.cached_tokens) == (name, hit)


async def test_a_replica_that_is_removed_after_the_decision_is_still_tried(
    setting: Setting,
) -> None:
    """What runs there goes on, so what was just sent on its way may as well."""
    for name in ("r0", "r1"):
        setting.add(name)
    decision = await setting.dispatcher.dispatch(
        Endpoint.COMPLETIONS, b'{"model": "m", "prompt": [1]}'
    )
    setting.registry.remove("r0")
    assert {attempt.replica_id for attempt in decision.attempts()} == {"r0", "r1"}


async def test_the_report_mode_is_taken_out_of_what_is_sent_and_of_nothing_else(
    setting: Setting,
) -> None:
    """It would spoil the engine's events; `/route` sends nothing, so nothing is taken out."""
    setting.add("r0")
    sent = (await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, REPORT_MODE)).asked
    assert sent.spec is not None
    assert sent.spec.has_report_mode
    assert (b"report_mode" in sent.body, b'"a"' in sent.body) == (False, True)
    asked = (await setting.dispatcher.dispatch(Endpoint.ROUTE, REPORT_MODE)).asked
    assert asked.spec is not None
    assert (asked.spec.has_report_mode, asked.body) == (False, REPORT_MODE)


async def test_each_attempt_goes_by_how_the_replicas_are_when_it_is_made(setting: Setting) -> None:
    """A request that waited for one frozen replica must not wait for the next one that is known to
    be frozen by then, nor come to one that an operator drained."""
    for name in ("r0", "r1", "r2", "r3"):
        setting.add(name, max_concurrent_requests=1)
    setting.registry.drain("r3")
    decision = await setting.dispatcher.dispatch(
        Endpoint.COMPLETIONS, b'{"model": "m", "prompt": [1, 2, 3]}'
    )
    attempts = decision.attempts()
    first, sick, well = [entry.candidate.replica_id for entry in decision.ranking]
    assert next(attempts).replica_id == first
    while setting.registry.get(sick).is_healthy:
        setting.registry.report_failure(sick, "connect")
    assert next(attempts).replica_id == well
    setting.registry.undrain("r3")
    assert next(attempts).replica_id == "r3", "left out of the ranking, and able since"
    assert decision.ranked("r3").reason == "draining when it was ranked, able since"
    assert next(attempts).replica_id == sick
    assert next(attempts, None) is None


async def test_a_retry_does_not_go_to_a_replica_that_is_draining_or_full_by_now(
    setting: Setting,
) -> None:
    """An operator who drains a replica waits for it to be empty, and a limit is a limit."""
    for name in ("r0", "r1", "r2"):
        setting.add(name, max_concurrent_requests=1)
    decision = await setting.dispatcher.dispatch(
        Endpoint.COMPLETIONS, b'{"model": "m", "prompt": [1, 2, 3]}'
    )
    attempts = decision.attempts()
    first, second, third = [entry.candidate.replica_id for entry in decision.ranking]
    assert next(attempts).replica_id == first
    setting.registry.drain(second)
    with in_flight(setting.load, third, 3, 3):
        assert next(attempts, None) is None


async def test_only_a_new_request_waits_for_room_at_a_busy_replica(setting: Setting) -> None:
    """One that failed elsewhere has waited: only a limit of the replica itself keeps it away."""
    setting.registry.gates = GateOptions(in_flight=1)
    replica = setting.add("r0")
    decision = await setting.dispatcher.dispatch(
        Endpoint.COMPLETIONS, b'{"model": "m", "prompt": [1, 2, 3]}'
    )
    assert setting.dispatcher.have_room(decision)
    with in_flight(setting.load, "r0", 3, 3):
        assert not setting.dispatcher.have_room(decision)
        assert decision.obstacle_of(replica, "") is None


async def test_a_request_without_a_prompt_is_timed_and_routed_without_tokens(
    setting: Setting,
) -> None:
    """`/tokenize` goes to the least loaded replica; there is nothing to tokenise or to compare."""
    setting.add("r0")
    body = b'{"model": "a", "prompt": "text"}'
    decision = await setting.dispatcher.dispatch(None, body)
    assert (decision.asked.spec, decision.tokenization_s) == (None, None)
    assert not decision.is_comparable_at(decision.ranked("r0").candidate)
    assert 0 < decision.routing_s < 60
    assert (decision.asked.model.name, decision.asked.body) == ("m", body)


async def test_a_session_is_named_by_the_header_or_else_by_the_body(setting: Setting) -> None:
    """Either alone keeps a conversation at one replica, and the header goes first."""
    for number in range(8):
        setting.add(f"r{number}")
    planner = RoutePlanner(
        make_policy("session"), Known(setting.load, recent=RecentPrefixes(setting.load.books))
    )
    dispatcher = Dispatcher(
        *(setting.models, setting.registry, planner, "session"),
        *(setting.responses, setting.large_work),
    )

    async def replica_of(header: str | None, user: str) -> str:
        body = b'{"model": "m", "prompt": [1], "user": "%s"}' % user.encode()
        decision = await dispatcher.dispatch(Endpoint.COMPLETIONS, body, Terms(session=header))
        return decision.ranking[0].candidate.replica_id

    names = [f"conversation {number}" for number in range(8)]
    by_body = [await replica_of(None, name) for name in names]
    assert [await replica_of(name, "someone") for name in names] == by_body
    assert len(set(by_body)) > 1


async def test_a_request_about_a_stored_response_is_of_the_model_that_its_holder_serves(
    setting: Setting,
) -> None:
    """Its metrics and logs have no other source for the name."""
    for name in ("r0", "r1"):
        setting.add(name).served = ServedModels(("m",))
    setting.holders.add(("r1", "resp_1"))
    decision = await setting.dispatcher.dispatch_to_holder("resp_1", b"")
    assert (list(decision.replicas), decision.model_name) == (["r1"], "m")
    unknown = await setting.dispatcher.dispatch_to_holder("resp_2", b"")
    assert (list(unknown.replicas), unknown.asked.model) == (["r0", "r1"], None)


async def test_where_one_model_is_served_a_request_without_a_model_is_for_it(
    setting: Setting,
) -> None:
    """Only among several is there nothing to go by."""
    setting.add("r0")
    decision = setting.dispatcher.dispatch_by_load(None, b"", needs_model=False)
    assert decision.asked.model is not None


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, None])
@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (lambda setting: None, UnknownModel),
        (lambda setting: _undiscovered(setting), NoReplica),
    ],
)
async def test_an_unknown_model_is_final_only_when_all_replicas_have_reported_theirs(
    setting: Setting,
    endpoint: Endpoint | None,
    prepare: Callable[[Setting], None],
    error: type[Exception],
) -> None:
    """404 tells a client not to try again."""
    prepare(setting)
    with pytest.raises(error):
        await setting.dispatcher.dispatch(endpoint, b'{"model": "other", "prompt": [1]}')


def _undiscovered(setting: Setting) -> None:
    setting.add("r0").served = ServedModels()


def _never_seen(setting: Setting) -> Replica:
    """Add a replica that never answered, and has just been found unhealthy."""
    replica = setting.registry.add(ReplicaConfig(url="http://127.0.0.1:99", id="dead"))
    for _ in range(HealthConfig().unhealthy_after):
        setting.registry.on_check(replica, "connection refused")
    assert not replica.is_healthy
    return replica


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, None])
async def test_a_replica_that_has_been_dead_for_long_leaves_an_unknown_model_final(
    setting: Setting, endpoint: Endpoint | None
) -> None:
    """503 is retried, and counts against the router's objective: a client's typo paged someone for
    as long as any replica was down."""
    setting.add("r0")
    _never_seen(setting)
    body = b'{"model": "other", "prompt": [1]}'
    setting.now += HealthConfig().ready_wait_s
    with pytest.raises(NoReplica, match="1 replicas have not reported"):
        await setting.dispatcher.dispatch(endpoint, body)
    setting.now += 1
    with pytest.raises(UnknownModel):
        await setting.dispatcher.dispatch(endpoint, body)


async def test_no_model_is_unknown_while_nothing_is_known_of_any_replica(setting: Setting) -> None:
    """A router that starts while its whole fleet is down must not tell clients to give up."""
    _never_seen(setting)
    setting.now += 10 * HealthConfig().ready_wait_s
    with pytest.raises(NoReplica):
        await setting.dispatcher.dispatch(None, b'{"model": "other"}')


async def test_an_empty_ranking_says_why_when_a_replica_is_required(setting: Setting) -> None:
    """The reasons, counted, are what the client's 503 says."""
    setting.add("r0")
    setting.registry.drain("r0")
    decision = await setting.dispatcher.dispatch(None, b'{"model": "m"}')
    assert list(decision.attempts()) == []
    with pytest.raises(NoReplica, match="1 draining"):
        decision.require_replica()


def _takes(replica: Replica, length: int | None, owner: str = "vllm") -> None:
    said = {} if length is None else {"max_model_len": length}
    replica.model_entries = {"m": {"id": "m", "owned_by": owner, **said}}


_TEXT = b'{"model": "m", "prompt": "a", "add_special_tokens": false}'


async def test_what_engines_serve_a_model_is_looked_at_when_one_has_said_it(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1,024 replicas the look took each request with a text 0.5 ms of the event loop."""
    asked: list[str] = []
    is_of = Replica.is_of
    monkeypatch.setattr(Replica, "is_of", lambda each, by: asked.append(each.id) or is_of(each, by))

    async def adds_special_tokens() -> bool:
        asked.clear()
        spec = (await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, _TEXT)).asked.spec
        assert spec is not None
        (prompt,) = spec.prompts
        assert isinstance(prompt, TextPrompt)
        return prompt.add_special_tokens

    replicas = [setting.add("r0"), setting.add("r1")]
    assert not await adds_special_tokens()
    for replica, is_known in zip(replicas, (False, True), strict=True):
        _takes(replica, 10, "sglang")
        setting.registry.on_discovered(replica, None, None, ())
        assert await adds_special_tokens() == is_known
        assert await adds_special_tokens() == is_known
        assert asked == []


_FIVE = b'{"model": "m", "prompt": [1, 2, 3, 4, 5]}'


async def test_a_prompt_that_is_longer_than_any_replica_takes_is_refused(setting: Setting) -> None:
    """Every replica would refuse it, after it was hashed here and sent."""
    for name, length in (("r0", 3), ("r1", 4)):
        _takes(setting.add(name), length)
    with pytest.raises(PromptTooLong, match="prompt: 5 tokens; this model takes at most 4"):
        await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, _FIVE)
    _takes(setting.registry.get("r1"), 5)
    assert (await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, _FIVE)).prompt_tokens == 5


@pytest.mark.parametrize(
    ("length", "owner", "endpoint", "body"),
    [
        (None, "vllm", Endpoint.COMPLETIONS, _FIVE),
        (3, "sglang", Endpoint.COMPLETIONS, _FIVE),
        (3, "vllm", Endpoint.EMBEDDINGS, _FIVE.replace(b"prompt", b"input")),
        (3, "vllm", Endpoint.COMPLETIONS, _FIVE[:-1] + b', "truncate_prompt_tokens": 3}'),
    ],
)
async def test_what_some_engine_may_take_is_not_refused(
    setting: Setting, length: int | None, owner: str, endpoint: Endpoint, body: bytes
) -> None:
    """One that does not report its length, that may cut or take prompts in pieces, or is told to
    cut."""
    _takes(setting.add("r0"), length, owner)
    assert (await setting.dispatcher.dispatch(endpoint, body)).ranking


@pytest.mark.parametrize("lengths", [(3, 3), (3, 4)])
async def test_what_every_engine_cuts_is_not_refused(
    setting: Setting, lengths: tuple[int, int]
) -> None:
    """Also where they cut to different lengths, and it is not known which ids are left."""
    for name, length in zip(("r0", "r1"), lengths, strict=True):
        _takes(setting.add(name), length)
    body = _FIVE[:-1] + b', "truncate_prompt_tokens": -1}'
    decision = await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body)
    assert decision.ranking
    assert decision.prompt_tokens == (2 if lengths == (3, 3) else 5)


@pytest.mark.parametrize(
    ("body", "checked"),
    [
        (b'{"model": "m", "prompt": [1]}', ["m"]),
        (b'{"model": "a", "prompt": [1]}', ["a"]),
        (b'{"model": "m:a", "prompt": [1]}', ["m:a", "a"]),
        (b'{"model": "m", "prompt": [1], "lora_path": "a"}', ["m", "a"]),
        (
            b'{"model": "m", "prompt": [[1], [2], [3]], "lora_path": ["a", null, "b"]}',
            ["m", "a", "b"],
        ),
    ],
)
async def test_a_key_is_checked_for_an_adapter_however_it_is_named(
    setting: Setting, body: bytes, checked: list[str]
) -> None:
    """A key for `m*` is none for the adapters of m."""
    setting.add("r0")
    names: list[str] = []
    await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body, Terms(check_model=names.append))
    assert names == checked
    if b"lora_path" not in body:
        names.clear()
        await setting.dispatcher.dispatch(None, body, Terms(check_model=names.append))
        assert names == checked


async def test_an_adapter_takes_as_much_as_its_model(setting: Setting) -> None:
    """Its own entry in `/v1/models` has no length, and its prompts were neither cut nor refused."""
    replica = setting.add("r0")
    _takes(replica, 3)
    adapter = {"id": "a", "owned_by": "vllm", "parent": "m", "max_model_len": None}
    replica.model_entries = {**replica.model_entries, "a": adapter}
    body = _FIVE.replace(b'"m"', b'"a"')
    cut = body[:-1] + b', "truncate_prompt_tokens": -1}'
    assert (await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, cut)).prompt_tokens == 2
    with pytest.raises(PromptTooLong):
        await setting.dispatcher.dispatch(Endpoint.COMPLETIONS, body)


async def test_a_body_that_cannot_be_read_is_a_bad_request(setting: Setting) -> None:
    """In both forms, with the place."""
    for endpoint in (Endpoint.COMPLETIONS, None):
        with pytest.raises(BadRequest, match=r"^\$"):
            await setting.dispatcher.dispatch(endpoint, b"[]")


async def test_a_prompt_is_read_as_the_only_engine_of_its_model_reads_it(setting: Setting) -> None:
    """SGLang makes another text of a chat than vLLM; of a mixed fleet's, one of the two."""
    _takes(setting.add("r0"), 100, "sglang")
    tool = b'{"type": "function", "function": {"description": "d", "name": "f"}}'
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [%b]}' % tool
    for other, is_sglang in ((None, True), ("sglang", True), ("vllm", False)):
        if other is not None:
            _takes(setting.add(f"r{len(setting.registry.replicas())}"), 100, other)
        (prompt,) = setting.dispatcher.read(Endpoint.CHAT, body).spec.prompts
        assert isinstance(prompt, ChatPrompt)
        assert prompt.tools is not None
        assert (prompt.is_sglang, "defer_loading" in prompt.tools[0]) == (is_sglang, is_sglang)
