"""What index, load and the memory of recent prompts know reaches the policy, rank by rank."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from kvevents.events import BlockStored, EventBatch
from router.config.replica import PeerTierConfig, ReplicaConfig
from router.fleet.engine_load import EngineLoad, EngineRankLoad
from router.fleet.health import HealthRecord
from router.fleet.load import LoadTracker
from router.fleet.quiet_moments import QuietMoments
from router.fleet.replica import Replica
from router.fleet.types import EventSource
from router.index.base import SourceId
from router.index.index import PrefixIndex
from router.index.mirror import ApproximateCaches, Mirror
from router.index.prompt import HashedPrompt
from router.policies import (
    LEAST_DELAY,
    Candidate,
    Ranked,
    RouteRequest,
    make_policy,
)
from router.prompt.prompts import TokenizedPrompt
from router.routing.booking import Booking, Bookings
from router.routing.planner import MAX_MATCHED_PROMPTS, Known, RoutePlanner, prepare
from router.routing.question import (
    ANY_RANK,
    UNREAD_RANK,
    Placement,
    RankChoice,
    RankQuestion,
    uncached_tokens,
)
from router.routing.recent_prefixes import RECENT_STEP, RecentPrefixes
from tests.support.loads import statistics_of

IDS = list(range(1, 257))
OTHER_IDS = list(range(5000, 5016))
R0 = SourceId("r0")


class Planning:
    """A planner with its real parts; only the clock stands still, and losses are set by hand."""

    def __init__(self, policy: str = "prefix", mirror: Mirror | None = None) -> None:
        self.index: PrefixIndex = PrefixIndex()
        self.load = LoadTracker(None if mirror is None else mirror.books)
        self.bookings: list[Booking] = []
        self.suspects: set[SourceId] = set()
        self.planner = RoutePlanner(
            make_policy(policy),
            Known(
                self.load,
                self.suspects,
                None if policy == LEAST_DELAY else RecentPrefixes(self.load.books, ttl_s=5),
                mirror,
            ),
            clock=lambda: 0.0,
            random=Random(4),
        )

    def store(
        self,
        source: SourceId,
        ids: Sequence[int],
        medium: str = "GPU",
        lora: str | None = None,
        extra: Any = None,
    ) -> None:
        """Blocks of 16 tokens, reported by a source."""
        hashes = [hash((lora, str(extra), *ids[: end + 16])) for end in range(0, len(ids), 16)]
        event = BlockStored(
            hashes,
            None,
            list(ids),
            medium,
            0,
            lora_name=lora,
            extra_keys=extra,
            kv_cache_spec_kind="full_attention",
            block_size=16,
        )
        self.index.apply(source, EventBatch(0.0, [event]))

    def prompts(self, *prompts: Sequence[int], **keys: Any) -> list[HashedPrompt]:
        tokenized = [TokenizedPrompt(array("I", ids), **keys) for ids in prompts]
        return prepare(self.index, tokenized)

    def question(
        self,
        prompts: Sequence[HashedPrompt],
        tokens: int = len(IDS),
        choice: RankChoice = ANY_RANK,
    ) -> RankQuestion:
        request = RouteRequest(model="m", prompt_tokens=tokens)
        return RankQuestion(request, self.index, prompts, choice)

    def rank(
        self,
        prompts: Sequence[HashedPrompt],
        *replicas: Replica,
        choice: RankChoice = ANY_RANK,
        tokens: int = len(IDS),
    ) -> Sequence[Ranked]:
        ranking, excluded = self.planner.rank(self.question(prompts, tokens, choice), replicas)
        assert not excluded
        return ranking

    def send(
        self, prompts: Sequence[HashedPrompt], tokens: int, replicas: Sequence[Replica]
    ) -> str:
        """Where a request goes; it stays in prefill."""
        chosen = self.rank(prompts, *replicas, tokens=tokens)[0].candidate
        question, source = self.question(prompts, tokens), SourceId(chosen.replica_id)
        at = Placement(question, chosen, source, uncached_tokens(tokens, chosen))
        self.bookings.append(Bookings(self.load, self.planner.visits, QuietMoments(1.0)).book(at))
        return chosen.replica_id

    def only(
        self, prompts: Sequence[HashedPrompt], found: Replica, choice: RankChoice = ANY_RANK
    ) -> Candidate:
        """The one candidate."""
        (ranked,) = self.rank(prompts, found, choice=choice)
        return ranked.candidate


@pytest.fixture
def planning() -> Planning:
    return Planning()


def replica(name: str = "r0", ranks: int = 1, p2p: PeerTierConfig | None = None) -> Replica:
    record = HealthRecord(1, 1)
    record.check_passed()
    made = Replica(ReplicaConfig(url="http://127.0.0.1:1", id=name, p2p=p2p), record, 0.0)
    made.sources = tuple(EventSource(rank, "tcp://127.0.0.1:1") for rank in range(ranks))
    return made


# --- hits -----------------------------------------------------------------------------------------


def test_hits_on_the_gpu_and_in_lower_tiers_are_told_apart(planning: Planning) -> None:
    """Bringing blocks back costs time that blocks on the GPU do not."""
    planning.store(R0, IDS[:64])
    planning.store(R0, IDS[:16], "CPU")  # shows that the tier keeps single blocks
    planning.store(R0, IDS[:128], "CPU")
    found = planning.only(planning.prompts([*IDS, 0]), replica())
    assert (found.gpu_cached_tokens, found.cached_tokens) == (64, 128)
    assert uncached_tokens(len(IDS), found) == len(IDS) - 128, "they are not computed again"


def test_what_each_tier_adds_reaches_the_policy(planning: Planning) -> None:
    """Of a batch, over all of its prompts."""
    planning.store(R0, IDS[:16])
    planning.store(R0, IDS[:16], "CPU")
    planning.store(R0, IDS[:64], "CPU")
    planning.store(R0, IDS[:16], "STORAGE")
    planning.store(R0, IDS[:128], "STORAGE")
    planning.store(R0, OTHER_IDS, "STORAGE")
    prompts = planning.prompts([*IDS, 0], [*OTHER_IDS, 0], [3])
    assert planning.only(prompts, replica()).by_tier == (("CPU", 48), ("STORAGE", 80))


def test_a_loss_of_events_reaches_the_policy(planning: Planning) -> None:
    """Otherwise a hit that may be gone counts as much as one that is certain."""
    planning.store(R0, IDS)
    prompts = planning.prompts([*IDS, 0])
    assert not planning.only(prompts, replica()).suspect
    planning.suspects.add(R0)
    assert planning.only(prompts, replica()).suspect


def test_an_estimate_replaces_a_loss_that_lasts_and_no_other(planning: Planning) -> None:
    """A replica without events has one from the start; a whole stream never has."""
    lost: dict[SourceId, float | None] = {SourceId("silent"): -math.inf, R0: None}
    mirror = Mirror(clock=lambda: 0.0)
    caches = ApproximateCaches(lost.__getitem__, mirror, after_s=10, clock=lambda: 0.0)
    planner = RoutePlanner(
        make_policy("prefix"),
        Known(LoadTracker(mirror.books), planning.suspects, mirror=mirror, approximate=caches),
        clock=lambda: 0.0,
    )
    planning.store(R0, IDS)
    prompts = planning.prompts([*IDS, 0])
    silent = replica("silent", 0)
    planner.fleets.note_streams(silent)
    planner.fleets.note_streams(replica())

    def candidates() -> dict[str, Candidate]:
        question = planning.question(prompts, len(IDS) + 1)
        ranking, _ = planner.rank(question, [replica(), silent])
        return {ranked.candidate.replica_id: ranked.candidate for ranked in ranking}

    found = candidates()
    assert (found["r0"].cached_tokens, found["r0"].is_approximate) == (256, False)
    assert (found["silent"].cached_tokens, found["silent"].is_approximate) == (0, True)
    question = planning.question(prompts, len(IDS) + 1)
    assert planner.visits.estimated_visit(Placement(question, found["r0"], R0, 1)) is None
    at = Placement(question, found["silent"], SourceId("silent"), len(IDS) + 1)
    visit = planner.visits.estimated_visit(at)
    assert visit is not None
    visit.first_token()
    visit.ended(0)
    assert candidates()["silent"].cached_tokens == 256
    planning.suspects.add(R0)
    lost[R0] = -9.0
    assert (candidates()["r0"].suspect, candidates()["r0"].is_approximate) == (True, False)
    lost[R0] = -10.0
    short = candidates()["r0"]
    assert (short.cached_tokens, short.suspect, short.is_approximate) == (0, False, True)
    planner.visits.forget("silent")
    assert candidates()["silent"].cached_tokens == 0
    silent.sources = (EventSource(0, "tcp://127.0.0.1:1"),)
    planner.fleets.note_streams(silent)
    assert not candidates()["silent"].is_approximate


def test_an_adapters_blocks_are_matched_with_its_prompts_only(planning: Planning) -> None:
    """The adapter changes every block's content."""
    planning.store(R0, IDS, lora="sql")
    with_it = planning.prompts([*IDS, 0], lora_name="sql")
    assert planning.only(with_it, replica()).cached_tokens == 256
    assert planning.only(planning.prompts([*IDS, 0]), replica()).cached_tokens == 0


def test_images_are_matched_by_their_keys(planning: Planning) -> None:
    """Two images have the same placeholder tokens."""
    planning.store(R0, IDS[:16], extra=[["cat.png"]])
    for name, hit in (("cat.png", 16), ("dog.png", 0)):
        prompts = planning.prompts([*IDS[:16], 0], extra_keys=[[name]])
        assert planning.only(prompts, replica()).cached_tokens == hit


def test_salted_prompts_match_their_own_blocks_only(planning: Planning) -> None:
    """A salt keeps tenants apart."""
    planning.store(R0, IDS[:16], extra=[["tenant"]])
    for salt, hit in (("tenant", 16), ("another", 0), (None, 0)):
        prompts = planning.prompts([*IDS[:16], 0], cache_salt=salt)
        assert planning.only(prompts, replica()).cached_tokens == hit


def test_hits_and_recent_tokens_of_all_prompts_of_a_batch_are_added_up(planning: Planning) -> None:
    """The engine computes all of them."""
    first, last = [*IDS, 0], [*range(1000, 1128), 0]
    planning.store(R0, first[:256])
    planning.store(R0, last[:64])
    prompts = planning.prompts(first, last)
    planning.store(R0, last[:16], "CPU")
    planning.store(R0, last[:128], "CPU")
    found = planning.only(prompts, replica())
    assert (found.gpu_cached_tokens, found.cached_tokens) == (256 + 64, 256 + 128)
    assert uncached_tokens(100, found) == 0, "a hit may be longer than what is known of a prompt"
    planning.planner.visits.remember(prompts, R0)
    assert planning.only(prompts, replica()).recent_tokens == 256 + 128


def test_the_first_prompts_of_a_long_batch_are_looked_up(planning: Planning) -> None:
    """A batch of thousands of prompts must not hold up the loop; its rest counts as uncached."""
    assert len(planning.prompts(*[IDS[:16]] * MAX_MATCHED_PROMPTS)) == MAX_MATCHED_PROMPTS
    assert len(planning.prompts(*[IDS[:16]] * (MAX_MATCHED_PROMPTS + 1))) == MAX_MATCHED_PROMPTS
    assert planning.prompts([], IDS[:16], []) != []
    assert len(planning.prompts([], IDS[:16], [])) == 1, "nothing is known of an empty one"


# --- recent prompts and load ----------------------------------------------------------------------


def test_a_hit_and_the_same_tokens_sent_just_now_count_once(planning: Planning) -> None:
    """For some seconds both are known of one prefix; added up, a half-cached prompt would look
    wholly cached."""
    planning.store(R0, IDS[:128])
    prompts = planning.prompts([*IDS, 0])
    planning.planner.visits.remember(planning.prompts(IDS[:128]), R0)
    found = planning.only(prompts, replica())
    assert (found.cached_tokens, found.recent_tokens) == (128, 128)
    assert uncached_tokens(256, found) == 128
    (ranked,) = planning.rank(prompts, replica())
    assert ranked.cost == pytest.approx(128)


def test_what_was_sent_to_a_replica_is_forgotten_with_it(planning: Planning) -> None:
    """A failed replica has lost what was being computed, at all its ranks."""
    prompts = planning.prompts(IDS)
    two = replica(ranks=2)
    for rank in range(2):
        planning.planner.visits.remember(prompts, SourceId("r0", rank))
    assert planning.only(prompts, two).recent_tokens == 256
    planning.planner.visits.forget("r0")
    assert planning.only(prompts, two).recent_tokens == 0


def test_what_a_replica_was_computing_is_forgotten_with_it_in_the_mirror_too() -> None:
    """A prompt behind another that died with its replica will not find it cached there; of several
    prompts nothing is expected but what is cached now."""
    planning = Planning(mirror=Mirror(clock=lambda: 0.0))
    prompts = planning.prompts(IDS)
    began = planning.only(prompts, replica())
    question = planning.question(prompts)
    planning.planner.visits.visit(Placement(question, began, R0, len(IDS)))
    assert planning.planner.visits.expected(question, R0, 0) == 255
    two = planning.question([*prompts, *prompts], 2 * len(IDS))
    assert planning.planner.visits.expected(two, R0, 16) == 16
    planning.planner.visits.forget("r0")
    assert planning.planner.visits.expected(question, R0, 0) == 0


@pytest.mark.parametrize("tokens", [130, 300, 700, 1000, 8000])
def test_a_burst_of_equal_prompts_is_computed_at_most_twice(tokens: int) -> None:
    """Idle replicas would compute it as soon, and again: machines' time for nothing. That its end
    is no whole number of keys must not make a queue of it."""
    planning = Planning(LEAST_DELAY, Mirror(clock=lambda: 0.0))
    prompts, fleet = planning.prompts(range(tokens)), [replica(f"r{n}") for n in range(4)]
    assert len({planning.send(prompts, tokens, fleet) for _ in range(16)}) <= 2


def test_prompts_that_begin_alike_have_one_home() -> None:
    """Routers that know nothing of each other, and get them before any event, send them to one
    replica; what begins otherwise goes to any."""
    fleet = [replica(f"r{n}") for n in range(4)]

    index = PrefixIndex()  # routers have equal keys if they share the board's secret

    def home(ids: Sequence[int]) -> str:
        planning = Planning(LEAST_DELAY, Mirror(clock=lambda: 0.0))
        planning.index = index
        return planning.send(planning.prompts(ids), len(ids), fleet)

    alike = [[*range(200), *range(1000 * number, 1100 * number)] for number in range(1, 20)]
    assert len({home(ids) for ids in alike}) == 1
    assert {home(range(start, start + 200)) for start in range(1000, 50_000, 1000)} == {
        "r0",
        "r1",
        "r2",
        "r3",
    }


def test_the_prompts_of_a_request_are_remembered_where_it_goes(planning: Planning) -> None:
    """The second of two equal prompts must go where the first is being computed."""
    prompts = planning.prompts(IDS)
    planning.planner.visits.remember(prompts, SourceId("r1"))
    ranking = planning.rank(prompts, replica("r0"), replica("r1"))
    assert [entry.candidate.replica_id for entry in ranking] == ["r1", "r0"]


# --- ranks ----------------------------------------------------------------------------------------


def test_the_rank_with_the_hit_is_asked_for(planning: Planning) -> None:
    """Left to itself the engine takes any, and computes the prompt again."""
    planning.store(SourceId("r0", 1), IDS)
    found = planning.only(planning.prompts([*IDS, 0]), replica(ranks=3))
    assert (found.dp_rank, found.cached_tokens) == (1, 256)


def test_of_equal_hits_the_one_on_the_gpu_wins(planning: Planning) -> None:
    """Blocks in a lower tier have to be brought back first."""
    prompts = planning.prompts([*IDS, 0])
    planning.store(SourceId("r0", 0), OTHER_IDS)
    planning.store(SourceId("r0", 0), IDS, "CPU")
    planning.store(SourceId("r0", 1), IDS)
    assert planning.only(prompts, replica(ranks=2)).dp_rank == 1


def test_a_longer_hit_in_a_lower_tier_beats_a_short_one_on_the_gpu(planning: Planning) -> None:
    """By what is left to compute."""
    planning.store(SourceId("r0", 0), IDS[:16])
    planning.store(SourceId("r0", 1), OTHER_IDS)
    planning.store(SourceId("r0", 1), IDS, "CPU")
    assert planning.only(planning.prompts([*IDS, 0]), replica(ranks=2)).dp_rank == 1


def test_the_rank_of_a_recent_prompt_is_asked_for(planning: Planning) -> None:
    """Before its events arrive, only the router knows where an equal prompt is being computed."""
    prompts = planning.prompts(IDS)
    planning.planner.visits.remember(prompts, SourceId("r0", 2))
    found = planning.only(prompts, replica(ranks=4))
    assert (found.dp_rank, found.recent_tokens) == (2, 256)


def test_hits_of_one_rank_do_not_lean_on_recent_prompts_of_another(planning: Planning) -> None:
    """They are two caches."""
    prompts = planning.prompts([*IDS, 0])
    planning.store(SourceId("r0", 0), IDS[:192])
    planning.planner.visits.remember(planning.prompts(IDS[:64]), SourceId("r0", 1))
    found = planning.only(prompts, replica(ranks=2))
    assert (found.dp_rank, found.cached_tokens, found.recent_tokens) == (0, 192, 0)


def test_a_busy_rank_gives_way_to_an_idle_one(planning: Planning) -> None:
    """The load of the whole replica would say nothing about which."""
    two = replica(ranks=2)
    flight = planning.load.started("r0", 5000, 5000, dp_rank=0)
    found = planning.only([], two)
    assert (found.dp_rank, found.load.requests) == (1, 0)
    flight.ended()
    planning.store(SourceId("r0", 0), IDS)
    busy = planning.load.started("r0", 100, 100, dp_rank=0)
    assert planning.only(planning.prompts([*IDS, 0]), two).dp_rank == 0, "worth waiting for"
    busy.ended()


@pytest.mark.parametrize(("policy", "rank"), [("prefix", 0), ("least_delay", 1)])
def test_a_policy_that_weighs_caches_chooses_among_ranks_too(policy: str, rank: int) -> None:
    """`prefix` takes half a queue for done; `least_delay` knows better, and a replica would be
    ranked for one reason and its rank chosen for another."""
    planning = Planning(policy)
    planning.store(SourceId("r0", 0), IDS[:128])
    busy = planning.load.started("r0", 200, 200, dp_rank=0)
    assert planning.only(planning.prompts(IDS), replica(ranks=2)).dp_rank == rank
    busy.ended()


def test_a_policy_that_looks_at_no_cache_leaves_ranks_to_the_estimated_wait() -> None:
    """Turns and sessions are about replicas."""
    planning = Planning("round_robin")
    planning.store(SourceId("r0", 1), IDS)
    ranks = [planning.only(planning.prompts(IDS), replica(ranks=3)).dp_rank for _ in range(3)]
    assert ranks == [1, 1, 1]


def test_a_rank_that_others_keep_busy_gives_way(planning: Planning) -> None:
    """The engine's metrics tell its ranks apart; shared out equally, both would look the same."""
    two = replica(ranks=2)
    ranks = EngineRankLoad(0, running=6, waiting=2), EngineRankLoad(1, running=1, waiting=0)
    two.take_engine_load(EngineLoad(7, 2, None, ranks), own_requests=1, now=0.0, own_by_rank={1: 1})
    idle = planning.only([], two)
    assert (idle.dp_rank, idle.load.foreign_requests, idle.load.waiting_requests) == (1, 0, 0)
    two.take_engine_load(EngineLoad(7, 2, None), own_requests=1, now=0.0)
    assert planning.only([], two).load.foreign_requests == 4, "told apart no longer"


def test_the_queue_of_a_replica_is_that_of_the_rank(planning: Planning) -> None:
    """With all ranks' requests a replica of eight would look eight times as busy as it is."""
    two = replica(ranks=2)
    two.take_engine_load(EngineLoad(5, 3, None), own_requests=0, now=0.0)
    flights = [planning.load.started("r0", 1000, 1000, dp_rank=rank) for rank in (0, 0, 1)]
    unknown = [planning.load.started("r0", 300, 300) for _ in range(2)]
    load = planning.only([], two).load
    assert (load.queued_prefill_tokens, load.prefilling_requests) == (1000 + 300, 2)
    assert (load.foreign_requests, load.waiting_requests) == (4, 2), "half, rounded up"
    for flight in (*flights, *unknown):
        flight.ended()
    assert statistics_of(planning.load).replicas == {}


def test_a_prompt_that_nothing_tells_apart_leaves_the_rank_to_the_engine(
    planning: Planning,
) -> None:
    """It balances better than the router, which sees only its own requests."""
    two = replica(ranks=2)
    assert planning.only([], two).dp_rank is None
    short = planning.prompts(IDS[: RECENT_STEP - 1])
    assert planning.only(short, two).dp_rank is None
    assert planning.only(planning.prompts(IDS), replica(ranks=1)).dp_rank is None


def test_new_prompts_are_spread_over_equal_ranks(planning: Planning) -> None:
    """They are pinned, so that the next one like it finds the same rank: always the first one would
    use the others' caches for nothing."""
    prompts = planning.prompts(IDS)
    found = {planning.only(prompts, replica(ranks=2)).dp_rank for _ in range(64)}
    assert found == {0, 1}


def test_where_the_rank_is_not_read_only_what_every_rank_has_counts(planning: Planning) -> None:
    """vLLM before 0.33 takes any rank for /v1/responses: a hit of one of them is luck."""
    prompts = planning.prompts([*IDS, 0])
    two = replica(ranks=2)
    planning.store(SourceId("r0", 0), IDS)
    planning.store(SourceId("r0", 1), IDS[:48])
    planning.planner.visits.remember(prompts, SourceId("r0", 0))
    planning.suspects.add(SourceId("r0", 1))
    found = planning.only(prompts, two, UNREAD_RANK)
    assert (found.gpu_cached_tokens, found.cached_tokens, found.recent_tokens) == (48, 48, 0)
    assert found.suspect
    assert found.dp_rank == 0, "asked for all the same: vLLM 0.33 reads it"
    assert planning.only(prompts, replica("r1"), UNREAD_RANK).dp_rank is None


def test_a_rank_that_the_client_asks_for_is_taken(planning: Planning) -> None:
    """Where clients may choose, the prediction must be that rank's."""
    planning.store(SourceId("r0", 0), IDS)
    planning.store(SourceId("r0", 1), IDS[:16])
    prompts = planning.prompts([*IDS, 0])
    found = planning.only(prompts, replica(ranks=2), RankChoice(asked=1))
    assert (found.dp_rank, found.cached_tokens) == (1, 16)
    assert planning.only([], replica(ranks=2), RankChoice(asked=1)).dp_rank == 1
    assert planning.only(prompts, replica(ranks=2), RankChoice(asked=9)).dp_rank == 0


def test_the_cache_of_a_candidate_is_that_of_its_rank() -> None:
    """Explanations and comparisons look there."""
    two = replica(ranks=2)
    assert two.cache_at(1) == SourceId("r0", 1)
    assert two.cache_at(None) == replica(ranks=0).cache_at(None) == R0


# --- what another replica's memory holds ----------------------------------------------------------

LONG = list(range(1, 4001))
LEAST_PULL = 512
PEERS = PeerTierConfig(port=7777)


def in_memory(planning: Planning, source: SourceId, count: int) -> None:
    """The GPU and the memory of a replica hold the beginning of a prompt."""
    planning.store(source, LONG[:count])
    planning.store(source, LONG[:16], "CPU")  # shows that the tier keeps single blocks
    planning.store(source, LONG[:count], "CPU")


@pytest.mark.parametrize("policy", ["prefix", LEAST_DELAY])
def test_a_busy_holder_s_prefix_is_pulled_by_an_idle_replica(policy: str) -> None:
    """It need not be computed again, and the holder need not be waited for; where nobody is busy,
    the holder it is."""
    planning = Planning(policy, Mirror(clock=lambda: 0.0))
    in_memory(planning, R0, 3200)
    fleet = [replica("r0", p2p=PEERS), replica("r1", p2p=PEERS)]
    prompts = planning.prompts(LONG)
    assert planning.rank(prompts, *fleet, tokens=4000)[0].candidate.replica_id == "r0"
    busy = planning.load.started("r0", 6000, 6000)
    chosen = planning.rank(prompts, *fleet, tokens=4000)[0].candidate
    assert (chosen.replica_id, chosen.pull_from) == ("r1", "r0")
    assert (chosen.gpu_cached_tokens, chosen.cached_tokens) == (0, 3200)
    assert chosen.by_tier == (("PEER", 3200),)
    assert uncached_tokens(4000, chosen) == 800
    busy.ended()


def test_only_what_the_other_s_memory_holds_can_be_pulled() -> None:
    """Its GPU is out of reach: events say what lies where."""
    planning = Planning(LEAST_DELAY, Mirror(clock=lambda: 0.0))
    in_memory(planning, R0, 1600)
    planning.store(R0, LONG[:3200])
    fleet = [replica("r0", p2p=PEERS), replica("r1", p2p=PEERS)]
    found = {
        each.candidate.replica_id: each.candidate
        for each in planning.rank(planning.prompts(LONG), *fleet, tokens=4000)
    }
    assert (found["r0"].cached_tokens, found["r0"].pull_from) == (3200, None)
    assert (found["r1"].cached_tokens, found["r1"].pull_from) == (1600, "r0")


def test_what_one_holds_oneself_is_not_pulled() -> None:
    """A pull brings the rest, if that is worth asking for."""
    planning = Planning(LEAST_DELAY, Mirror(clock=lambda: 0.0))
    in_memory(planning, R0, 3200)
    planning.store(SourceId("r1"), LONG[:1600])
    planning.store(SourceId("r2"), LONG[: 3200 - LEAST_PULL + 16])
    fleet = [replica(name, p2p=PEERS) for name in ("r0", "r1", "r2")]
    ranking = planning.rank(planning.prompts(LONG), *fleet, tokens=4000)
    by_tier = {each.candidate.replica_id: each.candidate.by_tier for each in ranking}
    assert by_tier == {"r0": (), "r1": (("PEER", 1600),), "r2": ()}


@pytest.mark.parametrize("hindrance", ["no tier there", "no tier here", "suspect", "sick", "batch"])
def test_nothing_is_pulled_where_it_would_not_be_there(hindrance: str) -> None:
    """Both need the tier, the events must be trusted, and the holder must answer."""
    planning = Planning(LEAST_DELAY, Mirror(clock=lambda: 0.0))
    in_memory(planning, R0, 3200)
    holder = replica("r0", p2p=None if hindrance == "no tier there" else PEERS)
    other = replica("r1", p2p=None if hindrance == "no tier here" else PEERS)
    if hindrance == "suspect":
        planning.suspects.add(R0)
    elif hindrance == "sick":
        holder.record.check_failed("down")
    prompts = planning.prompts(LONG, *[OTHER_IDS] * (hindrance == "batch"))
    ranking, _ = planning.planner.rank(planning.question(prompts, 4000), [holder, other])
    assert [each.candidate.pull_from for each in ranking] == [None] * len(ranking)


def test_a_full_replica_s_memory_can_still_be_read() -> None:
    """It is for want of room there that the prompt goes elsewhere."""
    planning = Planning(LEAST_DELAY, Mirror(clock=lambda: 0.0))
    in_memory(planning, R0, 3200)
    holder, other = replica("r0", p2p=PEERS), replica("r1", p2p=PEERS)
    holder.draining = True
    question = planning.question(planning.prompts(LONG), 4000)
    ranking, excluded = planning.planner.rank(question, [holder, other])
    assert [(each.candidate.replica_id, each.candidate.pull_from) for each in ranking] == [
        ("r1", "r0")
    ]
    assert [each.replica_id for each in excluded] == ["r0"]
