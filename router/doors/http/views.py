"""The bodies of the router's own responses, as types: what endpoints send, commands and tests read,
and the OpenAPI document describes.

msgspec structs, since `/route` and `/overview` are asked often: 256 replicas take 0.5 ms to encode.
The string under a field is its description in the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from kvevents.layout import KVCacheGroup
from kvevents.stream_state import SourceState
from kvevents.subscriber import SubscriberStatistics
from router.fleet.engine_load import EngineLoad
from router.fleet.types import EventSource, ReplicaView
from router.index import GroupHit
from router.telemetry.problems import Level, ReplicaProblem, SourceSummary
from router.telemetry.request_log import Totals
from router.telemetry.self_repair import Trust


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all of them."""


# --- probes and errors ----------------------------------------------------------------------------


class StatusView(View, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the router is alive, or ready."""

    status: Literal["ok", "ready", "not ready"]
    reason: str | None = None
    """Why it is not ready."""


class ErrorDetails(View, frozen=True, kw_only=True):
    """What was wrong with a request."""

    message: str
    """Place, value and rule; never anything of a prompt."""
    type: str
    """As in OpenAI's API."""
    code: str
    """The same for every error of one kind."""


class ErrorView(View, frozen=True, kw_only=True):
    """An error, in the form that OpenAI's SDKs understand."""

    error: ErrorDetails


class AnthropicErrorView(View, frozen=True, kw_only=True):
    """An error, in the form that Anthropic's SDKs understand."""

    type: Literal["error"] = "error"
    error: ErrorDetails


# --- a route --------------------------------------------------------------------------------------


class HitView(View, frozen=True, kw_only=True):
    """Prompt tokens that a replica would reuse."""

    gpu_cached_tokens: int
    cached_tokens: int
    """With what lower tiers would bring back."""
    by_tier: dict[str, int] = {}
    """What each lower tier, by its name in events, or shared store adds to the GPU's; `PEER` is
    another replica's memory."""
    pull_from: str | None = None
    """The replica from whose memory that is pulled."""
    suspect: bool
    """Events of the replica were lost, so the hit is doubtful and counts in part."""
    approximate: bool = False
    """There are no events of the replica: the hit is an estimate from what was sent there, in steps
    of 64 tokens, and counts as far as such estimates were right lately."""


class OverlapView(View, frozen=True, kw_only=True):
    """Prompt tokens that the chosen replica would reuse, in the words of other indexers."""

    longest_matched: int
    """All of them; where a model has several KV cache groups, what all groups allow."""
    gpu: int
    dp: dict[str, int] = {}
    """On the GPU, by data-parallel rank."""
    cpu: int
    """With what memory would bring back."""
    disk: int
    """With what all lower tiers would bring back."""


class SelectionView(View, frozen=True, kw_only=True, omit_defaults=True):
    """Where a gateway should send a request."""

    selection_id: str = ""
    """Of the reservation, where there is one."""
    model_name: str
    routing_group: str = "default"
    replica: str
    worker_id: int
    """The replica's id as a number, the same at every router."""
    dp_rank: int | None
    """The data-parallel rank to ask for; null lets the engine choose."""
    endpoint: str
    """The replica's URL."""
    address: str
    """Its `host:port`."""
    headers: dict[str, str] = {}
    """To be sent with the request."""
    body_fields: dict[str, Any] = {}
    """To be set in its body."""
    block_size: int
    """Tokens of a block."""
    overlap: OverlapView
    isl_tokens: int
    """Of the prompt, as far as its token ids are known."""
    effective_prefill_tokens: int
    """Of these, those to compute."""
    expected_tokens: int
    """Prompt tokens that will be cached when the engine admits the request: the prediction that is
    compared with its report."""
    groups: list[Sequence[GroupHit]] = []
    """By prompt: the longest prefix that each KV cache group by itself would allow; told where
    nothing is booked."""
    hit: HitView
    reason: str
    policy: str
    cost: float


class PromptView(View, frozen=True, kw_only=True):
    """One prompt of the request."""

    tokens: int
    """As far as its token ids are known."""
    coverage: Literal["whole", "prefix", "unknown"]
    """How much of the prompt those tokens are."""
    reason: str | None
    """Why the coverage is not `whole`."""
    lora_name: str | None
    """The adapter it runs with."""


class RankedReplica(View, frozen=True, kw_only=True):
    """One replica that could serve the request."""

    replica: str
    dp_rank: int | None
    """The data-parallel rank to ask for; null lets the engine choose."""
    cost: float
    """Never falls along the ranking; for the default policy, the delay in prefill tokens."""
    reason: str
    hit: HitView
    recent_tokens: int
    """Leading prompt tokens that were sent there so recently that events may not show them yet."""
    groups: list[Sequence[GroupHit]]
    """By prompt: the longest prefix that each KV cache group by itself would allow."""


class ExcludedReplica(View, frozen=True, kw_only=True):
    """One replica that serves the model but cannot take the request."""

    replica: str
    reason: str


class RouteView(View, frozen=True, kw_only=True):
    """Where a request would go; all else that is known only with `explain`."""

    replica: str
    dp_rank: int | None
    """The data-parallel rank to ask for; null lets the engine choose."""
    model: str
    policy: str
    prompt_tokens: int
    """Over all prompts, as far as they are known."""
    cost: float
    """For the default policy, the delay in prefill tokens."""
    hit: HitView
    expected_tokens: int
    """Prompt tokens that would be cached there when the engine admits the request: those ahead of
    it store their prompts and evict others."""
    reason: str
    routing_seconds: float
    """Hashing, matching and ranking."""
    prompts: list[PromptView] | msgspec.UnsetType = msgspec.UNSET
    ranking: list[RankedReplica] | msgspec.UnsetType = msgspec.UNSET
    """The best first."""
    excluded: list[ExcludedReplica] | msgspec.UnsetType = msgspec.UNSET


class ModelEntry(View, frozen=True, kw_only=True):
    """A model or an adapter, as in OpenAI's API."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvroute"
    root: str
    """The model itself, or the one that an adapter is for."""
    parent: str | None
    """The model that an adapter is for."""
    max_model_len: int | msgspec.UnsetType | None = msgspec.UNSET
    """The longest prompt and response together, where the engines say; of several the least."""


class ModelList(View, frozen=True, kw_only=True):
    """Every name that some healthy replica serves. Entries have all other fields that the engine's
    own have."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


# --- requests -------------------------------------------------------------------------------------


class RequestView(View, frozen=True, kw_only=True):
    """One request, as far as it is known by now."""

    number: int
    """The larger, the later."""
    change: int
    """Of all changes in the log, the one that touched this request last."""
    arrived_at: float
    """Unix time."""
    request_id: str
    trace_id: str | None
    """Of the distributed trace that it belongs to (W3C Trace Context); null where the client names
    none."""
    path: str
    model: str
    policy: str
    stream: bool
    prompt_tokens: int
    unknown: str | None
    """Why the prompt is not known in full."""
    replica: str | None
    """Where it was sent last."""
    dp_rank: int | None
    reason: str
    attempts: int
    last_failure: str | None
    """Of an attempt that another one followed, or the end."""
    predicted: HitView
    """By what was cached when it was sent."""
    expected: int | None
    """Tokens predicted to be cached when the engine admits it: requests ahead of it store their
    prompts and evict others. Null where that is not known."""
    actual: int | None
    """Cached tokens as the engine reported them; null where it did not."""
    verdict: Literal["exact", "near", "over", "under"] | None
    """The prediction compared with the report; `over` promised too much. An approximate one is
    never `exact`, but `near` where less than 64 tokens are between the two."""
    failed: bool
    """Through no fault of the client."""
    status: int | None
    end: str | None
    """How it ended; null while it runs."""
    first_byte_ms: float | None
    total_ms: float | None


class RequestsView(View, frozen=True, kw_only=True):
    """The requests routed last."""

    started_at: float
    """Unix time the router started: numbers and changes of another start mean nothing."""
    change: int
    """The last change; pass it as `after` to get only what is new."""
    requests: list[RequestView]
    """The latest change first."""


# --- replicas in full -----------------------------------------------------------------------------


class BlockCount(View, frozen=True, kw_only=True):
    """Blocks that one KV cache group holds in one tier."""

    group: int
    tier: str
    blocks: int
    unit_tokens: int | None
    """Tokens that a lower tier stores and loads together; null for the GPU."""


class CacheView(View, frozen=True, kw_only=True):
    """What the index knows of one cache, and what it assumes. Sizes in tokens."""

    blocks: list[BlockCount]
    stores: dict[str, list[BlockCount]] = {}
    """By name of the stores that it shares: blocks there, whoever wrote them."""
    unplaced_blocks: int
    """Their prefix is not known; without a known hash function no prompt can find them."""
    waiting_runs: int
    """Events that wait for their parent block."""
    given_up_runs: int
    is_incomplete: bool
    """Blocks were refused or given up, or an event that took blocks away could not be read."""
    hash_algorithm: str | None
    """The engine's hash function, where it is known."""
    groups: Sequence[KVCacheGroup]
    hash_block_size: int | None
    scheduler_block_size: int | None
    """Hits are multiples of this."""
    eagle: Sequence[int] | None
    """Groups that drop a block of each hit, since they hold a drafter's layers."""
    prefix_replay_tokens: int | None
    """A hit that is no longer is worth nothing."""
    assumptions: Sequence[str]
    """What is not known but assumed, in sentences."""


class FeedView(View, frozen=True, kw_only=True):
    """An event stream, and what came of it. In blocks unless it says otherwise."""

    model: str
    """Whose index it feeds."""
    state: SourceState
    """How far the hits of this source can be trusted."""
    stream: SubscriberStatistics
    stored: int
    removed: int
    skipped: int
    """Events of unknown type, removals of unknown blocks, blocks over a bound."""
    overflow: int
    """Part of *skipped*: blocks over a bound."""
    unreadable: int
    """Events that break the format, left out of their batch."""
    cleared: int
    """Times the source was emptied, to be rebuilt."""


class TrustView(View, frozen=True, kw_only=True):
    """How far the predictions for a source are believed, by comparisons in quiet moments."""

    state: Trust
    rebuilds: int
    """Times the source was rebuilt since its hits were predicted wrongly for long."""
    cause: str | None
    """The likely one, while they are wrong and a rebuild did not help or has to wait."""


class ApproximateView(View, frozen=True, kw_only=True):
    """The estimate that stands in for the events of a cache."""

    dp_rank: int
    tokens: int
    """That the cache may hold."""
    capacity_tokens: int
    """As far as reuse was seen to last."""
    trust: float
    """Of the tokens promised lately, the share that was cached."""


class SourceView(EventSource, frozen=True, kw_only=True):
    """One event stream and the cache it describes."""

    feed: FeedView | None
    """Null before it is followed."""
    cache: CacheView | None
    predictions: TrustView | None
    """Null before one was compared."""


class ReplicaDetails(ReplicaView, frozen=True, kw_only=True):
    """Everything known of a replica, as of now. Ages in seconds; secrets are left out."""

    sources: tuple[SourceView, ...]
    approximate: tuple[ApproximateView, ...] = ()
    """Caches whose hits are estimates."""


class ReplicaList(View, frozen=True, kw_only=True):
    """Every replica."""

    replicas: list[ReplicaDetails]


class RemovedReplica(View, frozen=True, kw_only=True):
    """A replica that is no longer known."""

    removed: str
    """Its id."""


# --- the overview ---------------------------------------------------------------------------------


class Headline(View, frozen=True, kw_only=True):
    """Whether anything is wrong, in one line."""

    level: Level
    text: str


class LastMinute(Totals, kw_only=True):
    """The last minute. The shares are for people; null where there was nothing."""

    seconds: float
    """How much time this covers: a minute, less after the start."""
    cached_share: str | None
    """Of the compared prompt tokens, those that engines reported as cached."""
    predicted_share: str | None
    """Of the compared prompt tokens, those predicted to be cached."""
    promised_share: str | None
    """Of all routed prompt tokens, those predicted to be cached."""
    mispredicted_share: str | None
    """Of the compared requests, those predicted wrongly."""


class GroupSummary(View, frozen=True, kw_only=True):
    """One KV cache group of a replica."""

    number: int
    label: str
    """Kind and reach: `window 64`."""
    kind: str | None
    """Null for a group that holds blocks before the layout is known."""
    reach: int | None
    """Tokens of its sliding window or attention chunk."""
    blocks: dict[str, int]
    """By tier, over all ranks."""
    block_size: int | None = None
    """Tokens; null before the layout is known."""


class HourView(View, frozen=True, kw_only=True):
    """The last hour, a value for each step, the oldest first; the last step still runs. Null where
    there was nothing to measure."""

    requests_per_s: list[float | None]
    reused_share: list[float | None]
    """Of the prompt tokens, what engines reported as cached."""
    first_byte_s: list[float | None]
    """The time to first byte that nine of ten responses kept."""
    mispredicted_share: list[float | None]
    """Of the predictions that could be compared."""
    gpu_blocks: list[float | None]
    """Held at the end of the step, over all groups."""
    removed_blocks: list[int]
    """That left the GPUs in this time, by KV cache group: evicted, or slid out of a window."""


class HistoryView(View, frozen=True, kw_only=True):
    """The last hour of the router, and of the replicas that were asked for."""

    now: float
    """Unix time."""
    step_s: float
    router: HourView
    replicas: dict[str, HourView]


class StoreSummary(View, frozen=True, kw_only=True):
    """One store that several replicas share, as the index of one model knows it."""

    name: str
    model: str
    blocks: int
    """Over all KV cache groups, whoever wrote them."""
    replicas: int
    """That share it and are followed."""


class UnknownTopicView(View, frozen=True, kw_only=True):
    """A topic under which publishers send to the router, and which no replica has."""

    topic: str
    reason: str
    messages: int


class ListenerView(View, frozen=True, kw_only=True):
    """An address that publishers connect to."""

    endpoint: str
    topics: int
    """That belong to a replica."""
    messages: dict[str, int]
    """By what became of them: `taken`, `unknown`, `malformed`, `overflow`, `late`."""
    unknown: list[UnknownTopicView]
    """The first of them."""


class ReplicaSummary(View, frozen=True, kw_only=True):
    """One replica in brief."""

    id: str
    url: str
    level: Level
    """Of its worst problem."""
    state: str
    health: str
    seconds_in_health: float
    health_duration: str
    """The same for people: `3 min`."""
    serves: int
    """Models and aliases."""
    requests: int
    """Of this router, in flight there."""
    prefill_tokens: int
    """Uncached prompt tokens of these that wait for a first token."""
    engine_load: EngineLoad | None
    """Load by the engine's own count; null where it does not report any."""
    sources_configured: bool
    sources: list[SourceSummary]
    approximate: tuple[ApproximateView, ...] = ()
    """Caches whose hits are estimates, since no events tell what they hold."""
    groups: list[GroupSummary]
    problems: list[ReplicaProblem]
    """The worst first."""


class Overview(View, frozen=True, kw_only=True):
    """The router at a glance."""

    started_at: float
    """Unix time."""
    now: float
    """Unix time."""
    uptime: str
    """For people: `3 min`."""
    policy: str
    under_way: int
    """Requests admitted and not ended."""
    hint_tokens: int = 0
    """Prompt tokens of hits that end where a replica was told to keep a boundary, since the
    start."""
    headline: Headline
    shortages: list[str] = []
    """What the system refuses the router, or did within the last minute."""
    minute: LastMinute
    models: list[str]
    """The first hundred."""
    tokenizers: dict[str, str]
    """What tokenises the prompts of each configured model: `fastokens`, `tokenizers` with the
    reason why it is not fastokens, or `replica`. The first hundred."""
    tiers: list[str]
    """That any replica has, the fastest first."""
    stores: list[StoreSummary] = []
    """What replicas share, by model and name. The first hundred."""
    listeners: list[ListenerView] = []
    """Where publishers connect to (`events.listen`)."""
    kinds: dict[str, str]
    """Words for the kinds of KV cache groups."""
    replicas: list[ReplicaSummary]
    """Those with the worst problems first, then by name."""


# --- examples -------------------------------------------------------------------------------------

_HIT = HitView(gpu_cached_tokens=960, cached_tokens=1008, suspect=False)
_ROUTE = RouteView(
    replica="replica-7",
    dp_rank=None,
    model="gemma-3",
    policy="least_delay",
    prompt_tokens=1024,
    cost=20.8,
    hit=_HIT,
    expected_tokens=1008,
    reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
    routing_seconds=0.000412,
    prompts=[PromptView(tokens=1024, coverage="whole", reason=None, lora_name=None)],
    ranking=[
        RankedReplica(
            replica="replica-7",
            dp_rank=None,
            cost=20.8,
            reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
            hit=_HIT,
            recent_tokens=0,
            groups=[[GroupHit(0, "full_attention", 960), GroupHit(1, "sliding_window", 1008)]],
        )
    ],
    excluded=[ExcludedReplica(replica="replica-8", reason="draining")],
)
_REQUEST = RequestView(
    number=4711,
    change=9422,
    arrived_at=1780000000.123,
    request_id="6f1c2b0d",
    trace_id="0af7651916cd43dd8448eb211c80319c",
    path="/v1/chat/completions",
    model="gemma-3",
    policy="least_delay",
    stream=True,
    prompt_tokens=1024,
    unknown=None,
    replica="replica-7",
    dp_rank=None,
    reason="1008 of 1024 tokens cached, 48 of them in a lower tier",
    attempts=1,
    last_failure=None,
    predicted=_HIT,
    expected=1008,
    actual=1008,
    verdict="exact",
    failed=False,
    status=200,
    end="completed",
    first_byte_ms=38.2,
    total_ms=1204.9,
)
_MODELS = [
    ModelEntry(id="gemma-3", created=1780000000, root="gemma-3", parent=None),
    ModelEntry(id="sql", created=1780000000, root="gemma-3", parent="gemma-3"),
]
EXAMPLES: dict[type[Any], View] = {
    StatusView: StatusView(status="not ready", reason="none of 3 replicas is healthy"),
    RouteView: _ROUTE,
    ModelList: ModelList(data=_MODELS),
    RequestsView: RequestsView(started_at=1779990000.5, change=9422, requests=[_REQUEST]),
    RemovedReplica: RemovedReplica(removed="replica-7"),
}
"""Values of the types they document: one that no longer fits does not pass the type checker."""
