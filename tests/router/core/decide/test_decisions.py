"""A whole decision of the core is that of the planner in Python, whatever the fleet is like, and so
is one where a plug-in orders what the core found."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from kvevents.events import BlockStored, EventBatch
from router.config.replica import PeerTierConfig, ReplicaConfig
from router.fleet.engine_load import EngineLoad, EngineRankLoad
from router.fleet.gate import GateOptions, ReplicaGate
from router.fleet.health import HealthRecord
from router.fleet.load import InFlight, LoadTracker, ReplicaLoad
from router.fleet.replica import Replica
from router.fleet.types import EventSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import Mirror
from router.index.prompt import HashedPrompt
from router.policies import (
    Candidate,
    Policy,
    PolicySettings,
    Ranked,
    RouteRequest,
    make_policy,
)
from router.prompt.prompts import TokenizedPrompt
from router.routing.planner import Known, RoutePlanner, prepare
from router.routing.question import UNREAD_RANK, RankChoice, RankQuestion
from router.routing.recent_prefixes import RECENT_STEP, RecentPrefixes
from tests.oracle.load import ReferenceLoad
from tests.oracle.mirror.approximate import ReferenceEstimates
from tests.oracle.mirror.mirror import ReferenceMirror
from tests.oracle.planner import ReferencePlanner
from tests.oracle.recent_prefixes import ReferenceRecent
from tests.oracle.scoring.policies import make_reference
from tests.router.core.decide.both import same
from tests.support.index import AskedCaches

BLOCK = 16
PROMPT = list(range(1, 2200))
PROMPTS = {
    "whole": PROMPT,
    "half as long": PROMPT[:1000],
    "other": [*range(1, 400), *range(9000, 9600)],
    "short": PROMPT[:40],
}
NOW = 1000.0
ALWAYS = float("-inf")
PRICES = {"CPU": 0.2}

few = st.integers(0, 3)
lengths = st.sampled_from([0, 60, 130]) | st.integers(0, 130)
seldom = st.sampled_from([False] * 6 + [True])
tokens = st.sampled_from([0, 100, 640, 2000]) | st.integers(0, 2500)
shares = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)


class Half(Random):
    """Draws the same number always, so that the place among the candidates decides."""

    def random(self) -> float:
        return 0.5


# --- fleets ---------------------------------------------------------------------------------------


@st.composite
def fleets(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What each replica is like."""
    return [draw(_replicas(name)) for name in draw(st.sampled_from(["a", "ba", "abc", "cabed"]))]


@st.composite
def _replicas(draw: st.DrawFn, name: str) -> dict[str, Any]:
    ranks = draw(st.sampled_from([0, 1, 1, 1, 2, 3]))
    sources = [SourceId(name, rank) for rank in range(max(ranks, 1))]
    return {
        "id": name,
        "ranks": ranks,
        "sources": sources,
        "speed": draw(st.sampled_from([1.0, 1.0, 2.5])),
        "limit": draw(st.integers(1, 3)) if draw(seldom) else None,
        "healthy": not draw(seldom),
        "draining": draw(seldom),
        "peer": not draw(seldom),
        "gate": draw(_gates) if draw(seldom) else {"options": GateOptions(), "steps": []},
        "engine": draw(st.none() | _engines(ranks)),
        "flights": draw(st.lists(_flights(ranks), max_size=3)),
        "held": {source: draw(_held) for source in sources},
        "suspect": [source for source in sources if draw(seldom)],
        "sent": [(source, draw(_sent)) for source in sources for _ in range(draw(few))],
        "lost": {source: draw(_lost) for source in sources if draw(st.booleans())},
        "recent": [draw(lengths) for _ in sources],
    }


_gates = st.fixed_dictionaries(
    {
        "options": st.builds(
            GateOptions,
            in_flight=st.none() | st.integers(1, 3),
            prefill_tokens=st.none() | tokens,
            breaker_failures=st.none() | st.just(1),
            max_back_off_s=st.just(60.0),
            slow_start_s=st.sampled_from([0.0, 20.0]),
        ),
        "steps": st.lists(
            st.sampled_from(["busy", "busy for t", "failed", "sent", "answered", "start", "later"]),
            max_size=4,
        ),
    }
)

_held = st.fixed_dictionaries(
    {"GPU": lengths, "CPU": st.just(0) | lengths, "STORAGE": st.just(0) | lengths, "window": few}
)
_sent = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(sorted(PROMPTS)),
        "hit": lengths,
        "loads": st.sampled_from([(), (("CPU", 1100),), (("CPU", 900), ("STORAGE", 300))]),
        "junction": st.sampled_from([0, 0, 64]),
        "takes": st.sampled_from([0.01, 0.2, 3.0]),
        "becomes": st.sampled_from(["nothing", "begun", "ended", "ended", "ended", "failed"]),
        "actual": st.none() | lengths,
    }
)
_lost = st.sampled_from([ALWAYS, NOW - 70.0, NOW - 3.0])


@st.composite
def _engines(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    told = draw(st.booleans()) and ranks > 1
    return {
        "load": EngineLoad(
            draw(few),
            draw(few),
            None,
            tuple(EngineRankLoad(rank, draw(few), draw(few)) for rank in range(ranks * told)),
            draw(st.none() | st.integers(1, 900)),
            draw(st.none() | st.integers(1, 3000)),
        ),
        "age": draw(st.sampled_from([1.0, 10.0, 10.5, 60.0])),
    }


def _flights(ranks: int) -> st.SearchStrategy[tuple[int, int, int | None, bool]]:
    rank = st.none() | st.integers(0, max(ranks, 1) - 1)
    return st.tuples(tokens, tokens, rank, st.booleans())


CHANGES = (
    *("sick", "well", "drained", "undrained", "lost", "found", "scraped", "faster", "ranks"),
    *("cleared", "stored", "dropped", "sent"),
)
changes = st.lists(st.tuples(st.sampled_from(CHANGES), few), max_size=4)
others = st.dictionaries(
    st.sampled_from("abz") | st.tuples(st.sampled_from("ab"), few),
    st.builds(ReplicaLoad, few, tokens, few, tokens),
    max_size=3,
)
questions = st.fixed_dictionaries(
    {
        "prompts": st.lists(st.sampled_from(sorted(PROMPTS)), max_size=2) | st.just(["whole"]),
        "length": st.just(len(PROMPT)) | st.integers(0, 2300),
        "choice": st.builds(
            RankChoice,
            is_read=st.booleans(),
            asked=st.none() | st.integers(0, 3),
            may_pull=st.just(True) | st.booleans(),
        ),
        "tenant": st.sampled_from(["", "t"]),
        "session": st.none() | st.text(max_size=3),
        "by_load": seldom,
        "before": changes,
    }
)


class Setting:
    """The same fleet before all planners: the readable one, the core's, and the core's where the
    readable form of the policy is a plug-in."""

    def __init__(
        self, fleet: list[dict[str, Any]], policy: str, follows: bool, has_recent: bool
    ) -> None:
        self.now = NOW
        self.index: PrefixIndex = PrefixIndex()
        self.replicas = [self._replica(each) for each in fleet]
        self.suspects = {source for each in fleet for source in each["suspect"]}
        self.silent: set[SourceId] = set()
        self._lost = {source: since for each in fleet for source, since in each["lost"].items()}
        self._fleet = fleet
        self._follows, self._has_recent = follows, has_recent
        self.mirrors: list[Any] = []
        self.estimates: list[Any] = []
        self.flights: list[InFlight] = []
        self.loads: list[Any] = []
        settings = PolicySettings(random=Half())
        reference, plug_in = (make_reference(policy, settings) for _ in range(2))
        self.readable = self._planner(reference, is_ours=False)
        self.in_core = self._planner(make_policy(policy, settings))
        self.plugged_in = self._planner(plug_in)
        for planner in (self.in_core, self.plugged_in):
            planner.decider.give_lots([0.5], [0.5])
        self._note_streams()
        if follows:
            self._send_before()

    def _replica(self, told: dict[str, Any]) -> Replica:
        record = HealthRecord(1, 1)
        gate = ReplicaGate(told["gate"]["options"], lambda: self.now)
        config = ReplicaConfig(
            url="http://127.0.0.1:1",
            id=told["id"],
            speed=told["speed"],
            max_concurrent_requests=told["limit"],
            p2p=PeerTierConfig(port=7777) if told["peer"] else None,
        )
        made = Replica(config, record, self.now, gate=gate)
        made.sources = tuple(EventSource(rank, "tcp://1:1") for rank in range(told["ranks"]))
        if told["healthy"]:
            record.check_passed()
        made.draining = told["draining"]
        if told["engine"] is not None:
            made.take_engine_load(told["engine"]["load"], 1, NOW - told["engine"]["age"])
        for source, held in told["held"].items():
            self._store(source, held)
        return made

    def _store(self, source: SourceId, held: dict[str, int]) -> None:
        kinds = [("full_attention", 0, None)]
        if held["window"]:
            kinds.append(("sliding_window", 1, 32))
        for kind, group, window in kinds:
            blocks = held["GPU"] // (held["window"] if group else 1)
            self._apply(source, "GPU", blocks, group, kind, window)
        for tier in ("CPU", "STORAGE"):
            self._apply(source, tier, min(held[tier], 1), 0, "full_attention", None)
            self._apply(source, tier, held[tier], 0, "full_attention", None)

    def _apply(
        self, source: SourceId, tier: str, blocks: int, group: int, kind: str, window: int | None
    ) -> None:
        if not blocks:
            return
        event = BlockStored(
            [1 + number for number in range(blocks)],
            None,
            PROMPT[: blocks * BLOCK],
            tier,
            group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            block_size=BLOCK,
        )
        self.index.apply(source, EventBatch(0.0, [event]))

    def _planner(self, policy: Policy, is_ours: bool = True) -> Any:
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        mirror: Any = None
        approximate: Any = None
        if self._follows:
            mirror = (
                Mirror(1 << 20, PRICES, 0.1, clock)
                if is_ours
                else ReferenceMirror(1 << 20, clock, lambda tier: PRICES.get(tier, 0.1))
            )
            make_estimates: Any = AskedCaches if is_ours else ReferenceEstimates
            approximate = make_estimates(self.lost_since, mirror, 10.0, 1600, 1 << 20, clock)
            self.mirrors.append(mirror)
            self.estimates.append(approximate)
        load = LoadTracker(mirror and mirror.books) if is_ours else ReferenceLoad()
        self.loads.append(load)
        recent = RecentPrefixes(load.books, 5.0) if is_ours else ReferenceRecent(5.0)
        known = {
            "load": load,
            "suspects": self.suspects,
            "recent": recent if self._has_recent else None,
            "mirror": mirror,
            "approximate": approximate,
            "engine_load_stale_after_s": 10.0,
        }
        planner: Any = (
            RoutePlanner(policy, Known(**known), clock, random=Half())
            if is_ours
            else ReferencePlanner(policy, clock=clock, random=Half(), **known)
        )
        for told in self._fleet:
            for uncached, prompt, rank, responds in told["flights"]:
                self.flights.append(load.started(told["id"], uncached, prompt, rank))
                if responds:
                    self.flights[-1].first_token()
            for source, blocks in zip(told["sources"], told["recent"], strict=True):
                sent = planner if isinstance(planner, ReferencePlanner) else planner.visits
                sent.remember(self._prepared([PROMPT[: blocks * BLOCK]]), source)
        return planner

    def lost_since(self, source: SourceId) -> float | None:
        return ALWAYS if source in self.silent else self._lost.get(source)

    def _note_streams(self) -> None:
        """Tell of the replicas that publish nothing."""
        self.silent = {replica.cache for replica in self.replicas if not replica.sources}
        if self._follows:
            self.estimates[0].silent = self.silent
        for replica in self.replicas:
            for planner in (self.in_core, self.plugged_in):
                planner.fleets.note_streams(replica)

    def _send_before(self) -> None:
        """Let all caches have a past, and a present."""
        sent = [each for told in self._fleet for each in told["sent"]]
        self.now = NOW - sum(each["takes"] for _, each in sent)
        for source, each in sent:
            (prompt,) = self._prepared([PROMPTS[each["prompt"]]])
            visits = self._visits(source, prompt, each)
            self.now += each["takes"]
            for visit in visits:
                if each["becomes"] in ("begun", "ended"):
                    visit.first_token()
                if each["becomes"] in ("ended", "failed"):
                    visit.ended(each["becomes"] == "ended")
            self._visit_estimates(source, prompt, each)
        self.now = NOW

    def _visits(self, source: SourceId, prompt: HashedPrompt, sent: dict[str, Any]) -> list[Any]:
        tokens = len(PROMPTS[sent["prompt"]])
        hit = min(sent["hit"] * BLOCK, tokens)
        return [
            mirror.begin(
                *("m", self.index, source, [prompt], tokens, tokens - hit, hit, 1.0),
                *(sent["loads"], sent["junction"]),
            )
            for mirror in self.mirrors
        ]

    def _visit_estimates(
        self, source: SourceId, prompt: HashedPrompt, sent: dict[str, Any]
    ) -> None:
        for estimates in self.estimates:
            estimates.stand_in(source, None, self.now)
            visit = estimates.visit(source, [prompt.prefix_keys(RECENT_STEP)], sent["hit"] * BLOCK)
            if visit is not None and sent["becomes"] == "ended":
                visit.first_token()
                visit.ended(None if sent["actual"] is None else sent["actual"] * BLOCK)

    def _prepared(self, prompts: Sequence[Sequence[int]]) -> list[HashedPrompt]:
        return prepare(self.index, [TokenizedPrompt(array("I", ids)) for ids in prompts])

    def take_others(self, loads: Mapping[Any, ReplicaLoad]) -> None:
        for load in self.loads:
            load.take_others(loads)

    def pass_gates(self, steps: Mapping[str, Sequence[str]]) -> None:
        """Let something happen at each replica."""
        for replica in self.replicas:
            gate = replica.gate
            for step in steps[replica.id]:
                if step == "later":
                    self.now += 6.0
                elif step == "start":
                    gate.start_slowly()
                elif step.startswith("busy"):
                    gate.busy(9.0, "t" if step.endswith("t") else "")
                else:
                    getattr(gate, step)()
        for replica in self.replicas:
            replica.look_at_gate()  # its speed in Python is that of the last look

    def change(self, what: str, number: int) -> None:
        """Let something happen between two questions."""
        replica = self.replicas[number % len(self.replicas)]
        source, record, index = replica.cache, replica.record, self.index
        faster = replica.config.model_copy(update={"speed": 1.0 + number})
        load = EngineLoad(number, 2, None, (), 100 * number)
        ranks = tuple(EventSource(rank, "tcp://1:1") for rank in range(number))
        steps: dict[str, Callable[[], object]] = {
            "sick": lambda: record.check_failed("down"),
            "well": record.check_passed,
            "drained": lambda: setattr(replica, "draining", True),
            "undrained": lambda: setattr(replica, "draining", False),
            "lost": lambda: self.suspects.add(source),
            "found": lambda: self.suspects.discard(source),
            "scraped": lambda: replica.take_engine_load(load, 0, self.now),
            "faster": lambda: replica.reconfigure(faster),
            "ranks": lambda: self._have_ranks(replica, ranks),
            "cleared": lambda: index.clear(source),
            "stored": lambda: self._apply(source, "GPU", 20 * number, 0, "full_attention", None),
            "dropped": lambda: index.drop(source),
            "sent": lambda: self._send(replica, 500 * number),
        }
        steps[what]()

    def _have_ranks(self, replica: Replica, ranks: tuple[EventSource, ...]) -> None:
        replica.sources = ranks
        self._note_streams()

    def _send(self, replica: Replica, tokens: int) -> None:
        for load in self.loads:
            self.flights.append(load.started(replica.id, tokens, 900, 0))
        (prompt,) = self._prepared([PROMPTS["half as long"]])
        for mirror in self.mirrors:
            mirror.begin("m", self.index, replica.cache, [prompt], 1000, tokens)

    def ask(self, planner: Any, question: dict[str, Any]) -> tuple[Any, Any]:
        request = RouteRequest(
            model="m", prompt_tokens=question["length"], session=question["session"]
        )
        tenant = question["tenant"]
        if question["by_load"]:
            asked = RankQuestion(request, choice=UNREAD_RANK, tenant=tenant)
        else:
            prompts = self._prepared([PROMPTS[name] for name in question["prompts"]])
            asked = RankQuestion(request, self.index, prompts, question["choice"], tenant)
        return planner.rank(asked, self.replicas)


def plain(candidate: Candidate) -> Candidate:
    """Without a price where there is nothing to load: the core asks for none."""
    has_lower = candidate.cached_tokens > candidate.gpu_cached_tokens
    return candidate if has_lower else replace(candidate, load_price=None, by_tier=())


def alike(found: Candidate, expected: Candidate) -> None:
    same(asdict(plain(expected)), asdict(plain(found)))


def agree(found: Sequence[Ranked], expected: Sequence[Ranked]) -> None:
    assert len(found) == len(expected)
    costs = {each.candidate.replica_id: each.cost for each in expected}
    for one, other in zip(found, expected, strict=True):
        assert one.cost == pytest.approx(other.cost, rel=1e-9, abs=1e-9)
        if one.candidate.replica_id != other.candidate.replica_id:  # from Python 3.12 on; see above
            assert one.cost == pytest.approx(costs[one.candidate.replica_id], rel=1e-9)
            continue
        alike(one.candidate, other.candidate)
        assert one.reason == other.reason


@settings(max_examples=150)
@pytest.mark.parametrize("policy", ["least_delay", "prefix", "round_robin", "session"])
@given(
    fleet=fleets(),
    asked=st.lists(questions, min_size=1, max_size=3),
    others=others,
    follows=st.booleans(),
    has_recent=st.booleans(),
)
def test_ranking_and_obstacles_are_those_of_the_readable_form(
    policy: str,
    fleet: list[dict[str, Any]],
    asked: list[dict[str, Any]],
    others: dict[Any, ReplicaLoad],
    follows: bool,
    has_recent: bool,
) -> None:
    """Hits, ranks, pulls, gates, doubts and loads meet in one decision: each alone says little."""
    setting = Setting(fleet, policy, follows, has_recent)
    setting.take_others(others)
    for question in asked:
        for what, number in question["before"]:
            setting.change(what, number)
        setting.pass_gates({told["id"]: told["gate"]["steps"] for told in fleet})
        expected, left_out = setting.ask(setting.readable, question)
        for planner in (setting.in_core, setting.plugged_in):
            found, excluded = setting.ask(planner, question)
            agree(found, expected)
            assert len(excluded) == len(left_out)
            for one, other in zip(excluded, left_out, strict=True):
                alike(one, other)
            if expected:
                assert found[0].candidate.replica_id == expected[0].candidate.replica_id
