"""Costs, policies and plug-ins: where a request goes, and why."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from router.errors import PolicyError
from router.fleet.load import InFlight, LoadTracker
from router.index.base import SourceId
from router.policies import (
    Candidate,
    CandidateLoad,
    PolicySettings,
    Ranked,
    RouteRequest,
    Weights,
    make_policy,
    policy_names,
)
from router.policies.policies import BUILT_IN
from router.routing.recent_prefixes import RecentPrefixes
from tests.oracle.scoring.ranking import rank


def request(
    prompt_tokens: int = 1000, session: str | None = None, model: str = "gemma"
) -> RouteRequest:
    return RouteRequest(model=model, prompt_tokens=prompt_tokens, session=session)


def order(
    name: str, asked: RouteRequest, candidates: Sequence[Candidate], seed: int = 1
) -> list[str]:
    policy = make_policy(name, PolicySettings(random=Random(seed)))
    return [entry.candidate.replica_id for entry in rank(policy, asked, candidates)[0]]


def estimate(prompt_tokens: int, candidate: Candidate, weights: Weights) -> Ranked:
    """The wait of a prompt at a candidate."""
    policy = make_policy("prefix", PolicySettings(weights))
    return policy.rank(request(prompt_tokens), [candidate])[0]


def cached(
    replica_id: str,
    gpu: int,
    total: int | None = None,
    recent_tokens: int = 0,
    suspect: bool = False,
    speed: float = 1.0,
    **load: int,
) -> Candidate:
    return Candidate(
        replica_id=replica_id,
        gpu_cached_tokens=gpu,
        cached_tokens=gpu if total is None else total,
        recent_tokens=recent_tokens,
        suspect=suspect,
        load=CandidateLoad(**load),
        speed=speed,
    )


# --- the default policy's costs -------------------------------------------------------------------


def test_among_idle_replicas_the_longest_hit_wins() -> None:
    """What the whole router is for."""
    assert order("prefix", request(), [cached("a", 0), cached("b", 640), cached("c", 320)]) == [
        "b",
        "c",
        "a",
    ]


def test_a_hit_is_given_up_when_waiting_for_it_costs_more_than_computing() -> None:
    """A queue of 4,000 tokens costs half of that, which is more than the 800 tokens that the hit
    saves."""
    busy = cached("warm", 800, queued_prefill_tokens=4000, prefilling_requests=4)
    assert order("prefix", request(), [busy, cached("cold", 0)]) == ["cold", "warm"]
    less_busy = cached("warm", 800, queued_prefill_tokens=1000, prefilling_requests=1)
    assert order("prefix", request(), [less_busy, cached("cold", 0)]) == ["warm", "cold"]


def test_an_offloaded_token_is_worth_less_than_a_gpu_token_and_more_than_none() -> None:
    """It has to come over PCIe, which is slower than to have it and faster than to compute it."""
    candidates = [cached("none", 0), cached("offloaded", 0, total=640), cached("gpu", 640)]
    assert order("prefix", request(), candidates) == ["gpu", "offloaded", "none"]


def test_each_tier_has_its_own_cost() -> None:
    """A bucket is slower than a disk, and a disk slower than the memory beside the GPU; where a hit
    takes from several, each counts for its share."""
    weights = Weights(tier_token={"storage": 0.5, "Bucket": 0.9})
    below = {
        "memory": (("CPU", 640),),
        "disk": (("STORAGE", 640),),
        "bucket": (("bucket", 640),),
        "both": (("CPU", 320), ("STORAGE", 320)),
        "not told apart": (),
    }
    costs = {
        name: estimate(640, replace(cached(name, 0, total=640), by_tier=by_tier), weights).cost
        for name, by_tier in below.items()
    }
    assert costs == pytest.approx(
        {"memory": 64, "disk": 320, "bucket": 576, "both": 192, "not told apart": 64}
    )


def test_a_reason_says_which_tiers_a_hit_is_in() -> None:
    """Two replicas with equal hits may differ in nothing else."""
    below = replace(cached("a", 16, total=64), by_tier=(("CPU", 32), ("bucket", 16)))
    assert estimate(64, below, Weights()).reason.startswith(
        "16 of 64 tokens cached and 48 offloaded (32 CPU, 16 bucket); "
    )


def test_an_estimated_hit_counts_as_far_as_it_is_believed() -> None:
    """And the reason says that it is one."""
    guess = replace(cached("guess", 640), approximate_trust=0.75)
    assert order("prefix", request(), [guess, cached("sure", 490)]) == ["sure", "guess"]
    found = estimate(1000, guess, Weights())
    assert found.cost == 1000 - 480
    assert "640 of 1,000 tokens estimated to be cached" in found.reason
    assert "counted by 75%" in found.reason


def test_a_hit_of_a_suspect_replica_counts_half() -> None:
    """Events were lost there, so the blocks may be gone; an equal hit elsewhere is better, half of
    it is not."""
    suspect = cached("suspect", 640, suspect=True)
    assert order("prefix", request(), [suspect, cached("sure", 640)]) == ["sure", "suspect"]
    assert order("prefix", request(), [suspect, cached("sure", 300)]) == ["suspect", "sure"]
    found = estimate(1000, suspect, Weights())
    assert found.cost == 1000 - 320, "nothing else is ahead of it"
    assert f"{1000 - 320} to compute" in found.reason


def test_a_prefix_that_was_just_sent_counts_a_little_less_than_one_that_is_there() -> None:
    """It will be there in a moment, unless that request fails."""
    candidates = [cached("sent", 0, recent_tokens=640), cached("there", 640), cached("none", 0)]
    assert order("prefix", request(), candidates) == ["there", "sent", "none"]


def test_requests_from_elsewhere_and_queues_of_the_engine_count() -> None:
    """A second router's load shows only in the engine's own count."""
    candidates = [
        cached("queueing", 0, foreign_requests=8, waiting_requests=4),
        cached("used", 0, foreign_requests=8),
        cached("decoding", 0, decoding_requests=8, decode_context_tokens=8000),
        cached("idle", 0),
    ]
    assert order("prefix", request(), candidates) == ["idle", "decoding", "used", "queueing"]


def test_a_replica_twice_as_fast_takes_twice_the_queue() -> None:
    """Clusters of mixed hardware are usual."""
    fast = cached("fast", 0, speed=2.0, queued_prefill_tokens=1900)
    assert order("prefix", request(), [fast, cached("slow", 0)]) == ["fast", "slow"]
    fuller = cached("fast", 0, speed=2.0, queued_prefill_tokens=2100)
    assert order("prefix", request(), [fuller, cached("slow", 0)]) == ["slow", "fast"]


def test_equal_costs_go_to_the_replica_with_fewer_requests() -> None:
    """Requests whose prompts are fully cached cost nothing in tokens, but still take a place."""
    candidates = [
        cached("two", 0, prefilling_requests=2),
        cached("one", 0, prefilling_requests=1),
    ]
    assert order("prefix", request(), candidates) == ["one", "two"]


def test_what_is_equal_in_every_way_is_drawn_at_random() -> None:
    """Several routers that see the same must not all send to the same replica."""
    firsts = {
        order("prefix", request(), [cached("a", 0), cached("b", 0)], seed)[0] for seed in range(20)
    }
    assert firsts == {"a", "b"}


def test_a_hit_beyond_the_prompt_gains_nothing_and_never_makes_a_cost_negative() -> None:
    """Speculation and tiers may claim the whole prompt, and a shorter prompt must not come out
    below zero."""
    found = estimate(100, cached("a", 5000, total=9000, recent_tokens=7000), Weights())
    assert found.cost == 0
    assert "counted as 0 to compute" in found.reason


def test_a_prompt_of_unknown_length_goes_by_load() -> None:
    """Images and unknown tokenizers leave nothing to match, and the request must still go somewhere
    sensible."""
    candidates = [cached("busy", 0, queued_prefill_tokens=500), cached("idle", 0)]
    assert order("prefix", request(prompt_tokens=0), candidates) == ["idle", "busy"]


def test_the_reason_names_hit_discount_load_and_wait() -> None:
    """It is what `/route` shows to a person who asks why."""
    busy = cached(
        "a",
        512,
        total=640,
        suspect=True,
        queued_prefill_tokens=2048,
        decoding_requests=3,
        waiting_requests=1,
    )
    policy = make_policy("prefix")
    [entry] = policy.rank(request(2000), [busy])
    assert entry.reason == (
        "512 of 2,000 tokens cached and 128 offloaded; discounted, since events were lost; "
        "1,680 to compute; 2,048 tokens of other prompts ahead; 3 in decode; "
        "1 waiting in the engine: an estimated wait of 3,014 prefill tokens"
    )


# --- what follows from the costs ------------------------------------------------------------------


class Cluster:
    """Replicas without engines: the router's own books, and the policy between them."""

    def __init__(self, replicas: int, prefix_keys: list[int]) -> None:
        self.names = [f"r{index}" for index in range(replicas)]
        self.load = LoadTracker()
        self.flights: list[InFlight] = []
        self.recent = RecentPrefixes(self.load.books, ttl_s=5)
        self.cached: Counter[str] = Counter()
        self.policy = make_policy("prefix", PolicySettings(random=Random(5)))
        self.keys = prefix_keys
        self.step = 64

    def send(self, prompt_tokens: int) -> str:
        """Route one prompt that begins with the prefix; it stays in flight, its response begun."""
        asked = request(prompt_tokens)
        recent = {
            name: self.recent.match(SourceId(name), self.keys, self.step, now=0)
            for name in self.names
        }
        candidates = [self._candidate(name, recent) for name in self.names]
        ranking, _ = rank(self.policy, asked, candidates)
        best = ranking[0].candidate
        self.recent.remember(SourceId(best.replica_id), self.keys, now=0)
        known = max(best.gpu_cached_tokens, best.recent_tokens)
        flight = self.load.started(best.replica_id, prompt_tokens - known, prompt_tokens)
        self.flights.append(flight)
        return best.replica_id

    def answer(self) -> None:
        """The last prompt's response begins, and its events arrive."""
        self.flights[-1].first_token()
        self.cached[self.flights[-1].replica_id] = len(self.keys) * self.step

    def _candidate(self, name: str, recent: dict[str, int]) -> Candidate:
        load = self.load.load_of(name)
        return Candidate(
            replica_id=name,
            gpu_cached_tokens=self.cached[name],
            cached_tokens=self.cached[name],
            recent_tokens=recent.get(name, 0),
            load=CandidateLoad(
                queued_prefill_tokens=load.prefill_tokens,
                prefilling_requests=load.prefilling_requests,
                decoding_requests=load.decoding_requests,
                decode_context_tokens=load.context_tokens,
            ),
        )


HOT_PREFIX = list(range(1, 129))  # 8,192 tokens at a step of 64


def test_one_hot_prefix_spills_over_once_its_replica_is_saturated() -> None:
    """A system prompt that every client uses must not pin all traffic to one replica, and a little
    must stay together."""
    cluster = Cluster(3, HOT_PREFIX)
    chosen = []
    for _ in range(300):
        chosen.append(cluster.send(prompt_tokens=8192 + 200))
        cluster.answer()
    spilled = next(index for index, name in enumerate(chosen) if name != chosen[0])
    assert 30 < spilled < 150, "it spills over neither at once nor never"
    counts = Counter(chosen)
    assert set(counts) == {"r0", "r1", "r2"}
    # Once every replica has the prefix, only load decides.
    assert max(counts.values()) - min(counts.values()) <= 2
    assert len(set(chosen[-3:])) == 3


def test_a_burst_of_equal_prompts_stays_together_before_the_first_event() -> None:
    """All of them arrive within one prefill: spread out, each replica would compute the same
    prefix."""
    cluster = Cluster(4, HOT_PREFIX)
    assert len({cluster.send(prompt_tokens=8192) for _ in range(50)}) == 1


def test_without_the_memory_of_recent_prompts_the_burst_would_scatter() -> None:
    """Guards the test above: what keeps them together must be the memory of recent prompts."""
    cluster = Cluster(4, [])
    assert len({cluster.send(prompt_tokens=8192) for _ in range(50)}) == 4


# --- the other policies ---------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    """The plain baseline against which everything else is measured."""
    policy = make_policy("round_robin")
    candidates = [Candidate(replica_id=name) for name in "cab"]
    firsts = [policy.rank(request(), candidates)[0].candidate.replica_id for _ in range(7)]
    assert firsts == ["a", "b", "c", "a", "b", "c", "a"]


def test_round_robin_keeps_turns_per_model() -> None:
    """With one turn for all, two models whose requests alternate would each always meet the same
    replica."""
    policy = make_policy("round_robin")
    candidates = [Candidate(replica_id=name) for name in "ab"]
    firsts = [
        policy.rank(request(model=model), candidates)[0].candidate.replica_id
        for model in ["m", "n"] * 3
    ]
    assert firsts == ["a", "a", "b", "b", "a", "a"]


def test_least_loaded_ignores_the_cache() -> None:
    """It is for models without prefix caching."""
    candidates = [cached("warm", 900, decoding_requests=2), cached("cold", 0, decoding_requests=1)]
    assert order("least_loaded", request(), candidates) == ["cold", "warm"]


SESSIONS = [f"session-{number}" for number in range(2000)]


def placed(names: Sequence[str], **speeds: float) -> dict[str, str]:
    candidates = [Candidate(replica_id=name, speed=speeds.get(name, 1.0)) for name in names]
    return {
        session: order("session", request(session=session), candidates)[0] for session in SESSIONS
    }


def test_a_session_stays_where_it_is() -> None:
    """Whatever the load and whatever the order in which candidates are listed."""
    candidates = [cached(name, 0) for name in "abc"]
    first = order("session", request(session="s"), candidates)
    busy = [cached(name, 500, decoding_requests=50) for name in "cba"]
    assert order("session", request(session="s"), busy, seed=9) == first


def test_when_a_replica_leaves_only_its_own_sessions_move() -> None:
    """Every other move would throw away a cache."""
    before, after = placed("abcd"), placed("abd")
    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert moved == {session for session in SESSIONS if before[session] == "c"}
    spread = Counter(after[session] for session in moved)
    assert set(spread) == set("abd")
    assert max(spread.values()) < 1.5 * min(spread.values())


def test_when_a_replica_joins_it_takes_only_its_share() -> None:
    """About a quarter of the sessions, all of them to the new one."""
    before, after = placed("abc"), placed("abcd")
    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert {after[session] for session in moved} == {"d"}
    assert 0.2 < len(moved) / len(SESSIONS) < 0.3


def test_an_unavailable_replicas_sessions_go_to_the_next_in_their_order() -> None:
    """All requests of a session must meet again on the same substitute."""
    all_of_them = [Candidate(replica_id=name) for name in "abcd"]
    first, second, *_ = order("session", request(session="s"), all_of_them)
    without = [
        Candidate(replica_id=name, obstacle="not healthy" if name == first else None)
        for name in "abcd"
    ]
    assert order("session", request(session="s"), without)[0] == second


def test_a_faster_replica_holds_more_sessions() -> None:
    """Twice the speed, twice the sessions."""
    shares = Counter(placed("ab", b=2.0).values())
    assert 1.7 < shares["b"] / shares["a"] < 2.3


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("round_robin", "its turn", "1 after the one whose turn it is"),
        ("session", "the replica of this session", "1 after the replica of this session"),
    ],
)
def test_the_reason_says_who_comes_first(name: str, first: str, second: str) -> None:
    """It is what `/route` and the log show of a decision."""
    policy = make_policy(name)
    candidates = [Candidate(replica_id="a"), Candidate(replica_id="b")]
    ranked = rank(policy, request(session="s"), candidates)[0]
    assert [entry.reason for entry in ranked] == [first, second]


def test_ids_and_sessions_that_read_alike_together_draw_apart() -> None:
    """Replica `a1` and session `2` are not replica `a` and session `12`."""
    policy, pairs = make_policy("session"), [("a1", "2"), ("a", "12"), ("a1", "12")]
    draws = {
        policy.rank(request(session=session), [Candidate(replica_id=name)])[0].cost
        for name, session in pairs
    }
    assert len(draws) == len(pairs)


def test_a_request_without_a_session_goes_to_the_least_loaded() -> None:
    """Not every client sends the header, and those that do not must not all share one replica."""
    candidates = [cached("busy", 0, decoding_requests=5), cached("idle", 0)]
    assert order("session", request(session=None), candidates)[0] == "idle"
    assert order("session", request(session=""), candidates)[0] == "idle"


# --- policies by name -----------------------------------------------------------------------------

PLUG_IN = """
class Reversed:
    def __init__(self, settings):
        self.settings = settings

    def rank(self, request, candidates):
        from router.policies import Ranked
        return [
            Ranked(candidate, index, "reversed")
            for index, candidate in enumerate(reversed(candidates))
        ]

def nothing(settings):
    return None

number = 5
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution with policies, as pip would leave it."""
    (tmp_path / "kvroute_test_plug_in.py").write_text(PLUG_IN)
    info = tmp_path / "kvroute_test_plug_in-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kvroute-test-plug-in\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[kvroute.policies]\n"
        "reversed = kvroute_test_plug_in:Reversed\n"
        "prefix = kvroute_test_plug_in:nothing\n"
        "missing = kvroute_no_such_module:Policy\n"
        "absent = kvroute_test_plug_in:Absent\n"
        "number = kvroute_test_plug_in:number\n"
        "nothing = kvroute_test_plug_in:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kvroute_test_plug_in", raising=False)
    return "reversed"


def test_a_plug_in_is_found_by_its_entry_point(installed: str) -> None:
    """Installing a package is all it takes; the configuration names it."""
    assert installed in policy_names()
    policy = make_policy(installed, PolicySettings(options={"depth": 3}))
    ranking, _ = rank(policy, request(), [Candidate(replica_id=name) for name in "abc"])
    assert [entry.candidate.replica_id for entry in ranking] == ["c", "b", "a"]
    assert policy.settings.options == {"depth": 3}  # type: ignore[attr-defined]


def test_a_built_in_policy_cannot_be_replaced_by_a_plug_in(installed: str) -> None:
    """A package must not change routing by merely being installed."""
    assert policy_names().count("prefix") == 1
    assert order("prefix", request(), [cached("a", 0), cached("b", 640)]) == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot be imported: No module named 'kvroute_no_such_module'"),
        ("absent", "cannot be imported"),
        ("number", "is int; it must be callable"),
        ("nothing", "made NoneType, which lacks rank"),
        ("nobody", f"'nobody' is unknown; known: {', '.join(BUILT_IN)}"),
    ],
)
def test_a_plug_in_that_cannot_be_used_says_what_is_wrong(
    installed: str, name: str, message: str
) -> None:
    """It shows at start-up, to an operator who did not write it."""
    with pytest.raises(PolicyError, match=message):
        make_policy(name)


def test_options_for_a_built_in_policy_are_refused() -> None:
    """Silently ignored options look like a policy that does not work."""
    with pytest.raises(
        PolicyError, match=r"policy.options: \['depth'\]; the built-in policy 'prefix' takes none"
    ):
        make_policy("prefix", PolicySettings(options={"depth": 3}))


class Wrong:
    """A policy that breaks the rules in a way given by its caller."""

    def __init__(self, ranked: list[Ranked]) -> None:
        self.ranked = ranked

    def rank(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        return self.ranked


A, B = Candidate(replica_id="a"), Candidate(replica_id="b")


@pytest.mark.parametrize(
    ("ranked", "message"),
    [
        ([Ranked(A, 1, "")], r"ranked \['a'\]; it must rank each of \['a', 'b'\] exactly once"),
        ([Ranked(A, 1, ""), Ranked(A, 1, "")], "exactly once"),
        ([Ranked(A, 1, ""), Ranked(B, 1, ""), Ranked(A, 1, "")], "exactly once"),
        (
            [Ranked(A, 1, ""), Ranked(B, 1, ""), Ranked(Candidate(replica_id="c"), 1, "")],
            "exactly once",
        ),
        ([Ranked(A, 2, ""), Ranked(B, 1, "")], "cost 1 after 2"),
        ([Ranked(A, 0, ""), Ranked(B, float("nan"), "")], "costs must be finite and ascend"),
        ([Ranked(A, 0, ""), Ranked(B, float("inf"), "")], "costs must be finite and ascend"),
    ],
    ids=["one lost", "one twice", "one again", "one invented", "costs fall", "nan", "infinite"],
)
def test_a_plug_in_that_breaks_the_rules_is_caught(ranked: list[Ranked], message: str) -> None:
    """A lost candidate would show only when a request has nowhere left to be retried."""
    with pytest.raises(PolicyError, match=message):
        rank(Wrong(ranked), request(), [A, B])
