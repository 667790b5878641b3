"""The compiled core, built from `core/`; see `core/binding/`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from kvevents.events import BlockHash
from router.fleet.entrance import OrderFacts
from router.index.base import ApplyResult, Hit, SourceId
from router.index.mirror_types import ByTier
from router.policies import Candidate, Weights
from router.serve.seams.fleet import ServedName

core_version: int
built_in_policies: tuple[str, ...]
"""Their names, as lists show them."""

_Load: TypeAlias = tuple[int, int, int, int, int]
"""The fields of a `ReplicaLoad`."""
_ComputedHashes: TypeAlias = tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]

_Layout: TypeAlias = tuple[
    Sequence[tuple[int, int, int | None, int | None, bool]], int, int, bool, int
]
"""Groups, size of a hash block and of a scheduler's, `eagle_sees_last_token`,
`prefix_replay_tokens`."""

class StateError(ValueError):
    """The state of a source that contradicts itself."""

class Prompt:
    """A prompt, packed, with the keys that were asked for so far."""

    def __init__(
        self,
        token_ids: Sequence[int],
        lora_name: str | None,
        cache_salt: str | None,
        extra_keys: bytes,
    ) -> None: ...
    def __len__(self) -> int: ...
    def tokens(self) -> bytes: ...

class EngineHashes:
    """A prompt's hashes as its engine computes them."""

class HitMap(Mapping[SourceId, Hit]):
    """The hit of every source of one match; each is made when it is asked for."""

    def __getitem__(self, source: SourceId) -> Hit: ...
    def __iter__(self) -> Iterator[SourceId]: ...
    def __len__(self) -> int: ...
    def columns(self, sources: list[SourceId]) -> tuple[list[int], list[int]]: ...

class SharedIndex:
    """One model's index as the rest of the core reads it."""

class Core:
    """All sources of one model, by slot."""

    def __init__(
        self,
        point: int,
        fold: int,
        limits: Sequence[int],
        no_hit: Hit,
        result: type[ApplyResult],
    ) -> None: ...
    def shared(self) -> SharedIndex: ...
    def new_number(self) -> int: ...
    def add(self, number: int, tier_units: Sequence[tuple[str, int, int]]) -> int: ...
    def add_store(self, name: str, tier_units: Sequence[tuple[str, int, int]]) -> int: ...
    def share(self, slot: int, stores: Sequence[tuple[int, Sequence[str], str | None]]) -> None: ...
    def has_unplaced(self, slot: int) -> bool: ...
    def drop(self, slot: int) -> bool: ...
    def tidy(self) -> bool: ...
    def set_layout(
        self,
        slot: int,
        layout: _Layout,
        is_announced: bool,
        lookahead: int,
    ) -> None: ...
    def borrow_layout(self, slot: int, layout: _Layout, read_lookahead: int) -> None: ...
    def unset_layout(self, slot: int, is_announced: bool, lookahead: int) -> None: ...
    def apply(
        self, slot: int, payload: bytes
    ) -> ApplyResult | tuple[Any, ...] | list[tuple[Any, ...]] | None: ...
    def apply_reported(
        self, slot: int, payload: bytes, is_canonical: bool, opaque: Sequence[int]
    ) -> tuple[Any, ...] | None: ...
    def note(
        self, slot: int, has_chain: bool, shows_extra_keys: bool, has_lost_removals: bool
    ) -> None: ...
    def holds_hash(self, slot: int, block_hash: object) -> bool: ...
    def hides_extra_keys(self, slot: int) -> bool: ...
    def uses_int_hashes(self, slot: int) -> bool: ...
    def engine_hashes(
        self,
        prompt: Prompt,
        algorithm: str,
        none_hash: bytes,
        block_size: int,
        lookahead: int,
        as_int: bool,
        extra_keys: Sequence[bytes],
    ) -> EngineHashes | None: ...
    def unplaced(self, slot: int) -> int: ...
    def blocks_held(self, slot: int) -> int: ...
    def removals(self, slot: int) -> int: ...
    def statistics(self, slot: int) -> dict[str, Any]: ...
    def hash(self, prompt: Prompt) -> None: ...
    def prefix_keys(self, prompt: Prompt, step: int) -> list[int]: ...
    def match(
        self,
        prompt: Prompt,
        slots: dict[SourceId, int],
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> HitMap: ...
    def match_source(
        self,
        prompt: Prompt,
        slot: int,
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> Hit: ...
    def match_tier(
        self,
        prompt: Prompt,
        slot: int,
        tier: str,
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> int: ...
    def group_hits(
        self,
        prompt: Prompt,
        slot: int,
        computed: Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]],
    ) -> list[int]: ...
    def hash_numbers(self, hashes: list[BlockHash]) -> EngineHashes: ...
    def match_hashes(self, slot: int, hashes: EngineHashes) -> tuple[Hit, list[int], int, bool]:
        """The hit, each group's tokens, how many hashes are held, and whether that is all there is
        to know."""

    def export_source(self, slot: int) -> bytes: ...
    def restore_source(self, slot: int, state: bytes) -> None: ...
    def sizes(self) -> tuple[int, int]: ...
    def copies(self, slot: int) -> list[tuple[int, str, int, int]]: ...
    def contradictions(self) -> list[str]: ...

class Visit:
    """One request at one cache, from its sending to its end. Steps may be repeated, or left out."""

    @property
    def number(self) -> int: ...
    @property
    def expected_tokens(self) -> int: ...
    def first_token(self, is_timed: bool = True) -> None: ...
    def ended(self, was_served: bool = True) -> None: ...

class LoadPrices:
    """What loading costs at a cache, by tier, in tokens to compute."""

    def of(self, tier: str) -> float: ...
    def mean(self, by_tier: ByTier) -> float: ...

class Mirror:
    """Every cache and model by its number; see `router.index.mirror.Mirror`."""

    def __init__(
        self,
        books: Books,
        max_keys: int,
        clock: Callable[[], float],
        prices: Sequence[tuple[str, float]],
        other_price: float,
        first_number: int,
    ) -> None: ...
    def begin(
        self,
        model: int,
        index: SharedIndex,
        source: int,
        cache: int,
        prompts: Sequence[Prompt],
        computed: Sequence[Sequence[tuple[int, bool, Sequence[EngineHashes | list[BlockHash]]]]],
        prompt_tokens: int,
        uncached_tokens: int,
        hit_tokens: int,
        speed: float,
        loads: ByTier,
        junction_tokens: int,
        keep: Sequence[int],
    ) -> Visit: ...
    def prefilling(
        self,
    ) -> list[tuple[int, int, tuple[int, int, int, list[int]] | None]]: ...
    def add_other(self, cache: int, tokens: int, keys: Sequence[int]) -> int: ...
    def remove_other(self, number: int) -> None: ...
    def forget(self, caches: Sequence[int]) -> None: ...
    def forget_model(self, model: int) -> None: ...
    def ended(self, cache: int) -> list[tuple[list[int], float]]: ...
    def prefill_tokens_per_s(self, model: int) -> float: ...
    def reuse_probability(self, model: int, idle_s: float) -> float: ...
    def load_prices(self, cache: int) -> LoadPrices | None: ...
    def outlooks(
        self, model: int, caches: Sequence[int], capacities: Sequence[int | None], now: float
    ) -> list[tuple[float, float | None, float, float, float, float]]:
        """Return of each cache the uncached tokens in prefill there that are computed by now, for
        how many seconds the block evicted next has been idle (None while it evicts nothing), the
        probability that this block is used again, prompt tokens to compute and requests that it got
        per second lately, and the cost of bringing back what it evicts, relative to computing
        it."""
    def in_prefill(self, prompt: Prompt, tokens: int) -> list[tuple[int, int, int]]:
        """Caches, and the tokens that the hit and the full attention of each will have before
        events show them."""
    def expected(
        self,
        cache: int,
        prompt: Prompt,
        prompt_tokens: int,
        hit_tokens: int,
        junction_tokens: int,
    ) -> int: ...
    def statistics(self) -> tuple[int, int, int, int]: ...

class Estimate:
    """What a cache without events may hold."""

    def hit(self, prompts: Sequence[Sequence[int]], most_tokens: int) -> tuple[int, float]: ...
    def eviction_age_s(self, now: float) -> float | None: ...

class EstimatedVisit:
    """One request at such a cache; nothing is stored before its first token."""

    def first_token(self) -> None: ...
    def ended(self, actual_tokens: int | None = None) -> None: ...

class Estimates:
    """Every such cache by its number; see `router.index.mirror.ApproximateCaches`."""

    def __init__(
        self,
        mirror: Mirror,
        after_s: float,
        cache_tokens: int,
        max_keys: int,
        clock: Callable[[], float],
    ) -> None: ...
    def stand_in(
        self, cache: int, lost_since: float | None, cache_tokens: int | None, now: float
    ) -> Estimate | None: ...
    def visit(
        self, cache: int, prompts: Sequence[Sequence[int]], hit_tokens: int
    ) -> EstimatedVisit | None: ...
    def forget(self, caches: Sequence[int]) -> None: ...
    def caches(self) -> list[int]: ...
    def statistics(
        self, cache: int, lost_since: float | None, now: float
    ) -> tuple[int, int, float] | None: ...

def block_hashes(
    prompt: Prompt,
    algorithm: str,
    none_hash: bytes,
    block_size: int,
    lookahead: int,
    extra_keys: Sequence[bytes],
) -> bytes | None: ...
def pack_token_ids(json_array: bytes | memoryview) -> bytes | None: ...

# --- HTTP without I/O, for its tests -------------------------------------------------------------

HttpFields = list[tuple[bytes, bytes]]
HttpProblem = tuple[int, str, str]
"""Status, code and message."""

class BodyReader:
    """Reads one body as it comes; `next` returns `(used, payload, is_last, is_bad)`."""

    def __init__(
        self,
        framing: str,
        length: int = 0,
        chunk_line_bytes: int = ...,
        trailer_bytes: int = ...,
    ) -> None: ...
    def next(self, data: bytes) -> tuple[int, bytes, bool, bool]: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def problem(self) -> HttpProblem: ...

def read_request_head(
    data: bytes, head_bytes: int = ..., fields: int = ...
) -> dict[str, Any] | HttpProblem | None: ...
def read_response_head(
    data: bytes, is_of_head_request: bool = False, head_bytes: int = ..., fields: int = ...
) -> dict[str, Any] | HttpProblem | None: ...
def read_requests(
    data: bytes,
) -> tuple[list[tuple[bytes, bytes, int, HttpFields, bytes, int]], str]: ...
def read_responses(data: bytes) -> tuple[list[tuple[int, int, HttpFields, bytes, int]], str]: ...
def write_status(status: int, reason: bytes) -> bytes: ...
def write_request_line(method: bytes, target: bytes) -> bytes: ...
def write_field(name: bytes, value: bytes) -> bytes: ...
def write_chunk(payload: bytes) -> bytes: ...
def is_hop_by_hop(name: bytes) -> bool: ...

class EventLines:
    """Passes an event stream on in whole events; `tests/oracle/event_lines.py` has it in Python."""

    def release(self, piece: bytes, is_last: bool) -> bytes: ...
    def has_finished(self) -> bool: ...
    def separator(self) -> bytes: ...

class UsageCapture:
    """Keeps what `router.plane.usage.UsageReader.take` reads the usage from."""

    def feed(self, piece: bytes) -> None: ...
    def finish(self) -> tuple[int, bool, bytes, bytes]: ...

def read_ask(body: bytes) -> tuple[str, list[int], bool] | None:
    """Model, token ids and whether it streams; None where the body needs a closer look."""

def read_report(
    method: str, target: bytes, body: bytes, prompt_tokens: int
) -> tuple[bool, bool, int, bytes] | None:
    """Whether a response had begun by a gateway's report, whether it was served whole by its end,
    tokens of it, and what the engine reported, as JSON; None where it is none, or needs a closer
    look.

    Args:
        prompt_tokens: Of the reservation.
    """

class Booking:
    """A request that the core has booked."""

    def first_byte(self, is_timed: bool) -> None: ...
    def generated(self, tokens: int) -> None: ...
    def ended(self, was_served: bool) -> bool:
        """Whether no other request that the core decided was there meanwhile, or shortly before."""
    def reported(self, cached_tokens: int | None) -> None:
        """Note the cached tokens that the engine reported, after the end; None: it reported none.
        An estimated hit learns from it."""

class Place:
    """One of the reservations that there may be; it goes back with its last reference."""

    def give_back(self) -> None: ...

class Reservations:
    """Gateways' reservations, by name: bounds their number, and keeps what the core has booked."""

    def __init__(self, most: int) -> None: ...
    def take(self, reservation_id: str) -> Place | None: ...
    def has(self, reservation_id: str) -> bool: ...
    def held(self) -> int: ...
    def completed(self) -> int:
        """Return how many were served whole and never handed over."""
    def hand_over(self, reservation_id: str) -> list[tuple[Any, ...]]:
        """Return one that the core keeps, as an event of `Plane`; none where it does not. Reports
        on it come as events from now on."""
    def hand_over_at(self, replica: str) -> list[tuple[Any, ...]]:
        """Likewise all that are booked at a replica."""
    def hand_over_silent(self, since: float, most: int) -> list[tuple[Any, ...]]:
        """Likewise those without a report since then, the longest silent first."""

class Networks:
    """Networks that addresses belong to."""

    def add(self, address: str, bits: int) -> bool: ...
    def contains(self, host: str) -> bool: ...

class RequestSums:
    """Sums up requests that were served whole, as `Plane` does: its `summed`."""

    def __init__(
        self,
        routing_s: Sequence[float],
        first_byte_s: Sequence[float],
        seconds: Sequence[float],
        error_tokens: Sequence[float],
    ) -> None: ...
    def add(
        self,
        model: str,
        replica: str,
        tokens: tuple[int, int, int],
        seconds: tuple[float, float, float],
        usage: tuple[int | None, int | None] | None,
    ) -> None:
        """A request is over.

        Args:
            model: Its model.
            replica: That served it.
            tokens: Of the prompt, predicted to be cached, and for the moment of admission.
            seconds: Of the decision, of the first byte, and in all.
            usage: Tokens of the prompt and cached ones, as reported; None: not to be compared.
        """
    def take(self) -> list[tuple[Any, ...]]: ...

def plain_usage(is_json: bool, last: bytes, first: bytes) -> tuple[int | None, int | None] | None:
    """Tokens of the prompt and cached ones in what was kept of a response; None where it is not in
    OpenAI's form of completions, or not quite plain."""

def with_field(body: bytes, name: str, value: bytes) -> bytes | None:
    """The body with a field of its own at the top; None where a field's name has escapes in it."""

def with_model(body: bytes, name: str) -> bytes | None:
    """The body with another model; None where a field's name has escapes in it."""

class Placing:
    """Decides requests whose token ids are known without Python."""

    def __init__(
        self,
        decider: Decider,
        quiet_s: float,
        order: OrderFacts,
        reservations: Reservations,
    ) -> None:
        """The books of *decider* have a `Mirror`."""
    def serve(self, models: dict[str, ServedName]) -> None:
        """What is served by each name, in place of what was."""
    def under_way(self) -> int: ...
    def allow(self, most: int) -> None:
        """From now on no more requests than so many may be under way here."""
    def company(self, replica_id: str) -> tuple[int, int, float]:
        """Requests under way at a replica, those begun there in all, and when the last ended:
        seconds on the monotonic clock, or -inf."""
    def begun(self) -> dict[str, int]:
        """Requests that began at each replica."""
    def forget(self, replica_id: str) -> None: ...

def load_tls(places: Sequence[str]) -> str:
    """Find OpenSSL 3; return its version. The first call decides for the process.

    Args:
        places: Modules that are linked with it, or libraries, by path or by the name that the
            system's loader knows.
    Raises:
        ValueError: It is nowhere; names what was tried.
    """

class TlsContext:
    """Who one is, and whom one trusts. `load_tls` has been called. PEM files; empty: none.

    Raises:
        ValueError: A file cannot be used.
    """

    @staticmethod
    def for_clients(certificate: str, key: str, authorities: str) -> TlsContext: ...
    @staticmethod
    def for_servers(certificate: str, key: str, authorities: str) -> TlsContext:
        """Without authorities, those of the system are trusted."""

class BodyShare:
    """Counts the body of a request as held by the core."""

    def give_back(self) -> None: ...

class Plane:
    """The data plane's threads.

    Events, each a tuple of its kind, the number of its exchange, and its fields:

        opened      method, target, whether it is of the reserve, fields, client's host and port,
                    what came of the body, whether that is all, whether it was prepared before, and
                    what counts the body as held by the core, or None
        prepare     the place of its path among those that are prepared, fields if they matter,
                    and the body, which is whole: `place` or `open` follows
        prepare_question  what a gateway asks for: 0 where a request would go, 1 a replica to send
                    it to, 2 the same with a reservation; fields and body, likewise
        body        a piece, whether it is the last one
        left        the client left before anything was sent on, or placed
        failed      an attempt, before its first byte: how, and why
        not_now     status, seconds to wait or None
        first_byte  status
        progress    events of the stream since the last
        beginning   a part of the beginning of the body
        ended       how, status, seconds, bytes of the body, the failure in mid-body or None, events
                    since the last progress, whether the body is JSON, its last and its first usage
        refused     why a connection was ended; of no exchange
        handed_over of a request that was decided without Python: the replica that did not serve it,
                    the failure or None, status, seconds to wait or None, those since it was sent
                    first, and the same of the attempt beside that one, or None; `opened` follows
        overtaken   the same of one that its second replica serves: it goes on there
        second_attempt  what became of one: `begun`, `won`, `failed`, `not_allowed`; of no exchange
        reserved    a gateway got the replica for a request that it sends itself: the id of its
                    reservation, its booking, its place, the reason, tokens by lower tier, the
                    record of `settled`, and the time of the last report on it. Where `sum_up` was
                    called, most are no events: see `Reservations`
        reported    what that gateway reports of it: its id, `first_token`, `output` or `end`, the
                    body, and when
        looked_up   a gateway was answered where a request would go: model, seconds of the
                    decision, those of the tokens before it or None; of no exchange
        long_prompt such a request has much to compute, and was sent; of no exchange
        running     such a request takes a while, or has its first byte since: the record of
                    `settled`
        settled     the same at its end: a record, and where the hit was an estimate, its booking,
                    which waits for `reported`, or else None. The record is model, replica, request
                    id, client's host and port, rank, tokens of the prompt, cached on the GPU,
                    cached, and expected, whether the prediction was suspect, the share of an
                    estimate that counted or None, what was asked (the place of its path, whether
                    it streams, is comparable, has a salt, an adapter, seconds of tokenisation or
                    None), whether it had the replica to itself among such, when it began, seconds
                    of the decision and of the first byte, then as in `ended`, with all events
        summed      such requests that were served whole; of no exchange: model, replica, how many,
                    tokens of their prompts and predicted to be cached; seconds of the decision, of
                    the first byte and in all, each as counts by bucket and their sum; comparisons
                    with the cached tokens that were reported, and with none where only those of the
                    prompt were: how many, tokens of prompts, cached tokens, for the moment of the
                    decision and for that of admission the tokens predicted and how many exact,
                    over and under, and how far off (counts by bucket, and sum)
    """

    def __init__(
        self,
        options: dict[str, Any],
        listeners: list[int],
        towards_clients: TlsContext | None = None,
        towards_replicas: TlsContext | None = None,
    ) -> None: ...
    def secure(
        self, towards_clients: TlsContext | None, towards_replicas: TlsContext | None
    ) -> None:
        """For new connections."""
    def fileno(self) -> int: ...
    def take(self) -> list[tuple[Any, ...]]: ...
    def sum_up(
        self,
        routing_s: Sequence[float],
        first_byte_s: Sequence[float],
        seconds: Sequence[float],
        error_tokens: Sequence[float],
    ) -> None:
        """Report usual requests in sums, once 32 have ended since the last `take`.

        Args:
            routing_s: The bounds of a histogram's buckets, all but the last.
            first_byte_s: The same.
            seconds: The same.
            error_tokens: The same.
        """
    def ring(self) -> None:
        """Have the descriptor be readable once more."""
    def forward(
        self,
        id: int,
        origin: str,
        hosts: Sequence[str],
        port: int,
        secure_host: str,
        authority: bytes,
        base_path: bytes,
        replaced: Sequence[tuple[bytes, bytes | None]],
        added: Sequence[tuple[bytes, bytes]],
        reported: Sequence[tuple[bytes, bytes]],
        body: bytes | None,
        timeouts: tuple[float, float, float],
        flags: int,
        dialect: int,
    ) -> None: ...
    def place(
        self,
        id: int,
        model: str,
        tokens: Sequence[int],
        is_stream: bool,
        is_comparable: bool,
        tokenization_s: float,
        more: tuple[Any, ...] | None,
    ) -> None:
        """A prompt was read.

        Args:
            more: The body to send or None, the salt or None, session, tenant, fields for the engine
                and of the response, lengths to keep, whether the client names the model
                otherwise, the class of its key or None, and the name of a gateway's reservation.
        """
    def open(self, id: int) -> None: ...
    def hold_back(self) -> None:
        """Until `wake`, the threads are woken for a few commands at a time."""
    def wake(self) -> None: ...
    def accept_host(self, host: bytes) -> None: ...
    def respond(
        self, id: int, status: int, fields: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> None: ...
    def end_for_memory(self, id: int) -> None:
        """Respond that the router is out of memory, or cut the client off where it is too late for
        that; needs no memory itself."""
    def read_body(self, id: int) -> None: ...
    def pass_on(self, id: int) -> None: ...
    def cut(self, id: int) -> None: ...
    def give_up(self, origin: str, silent_s: float) -> None: ...
    def decide_by(self, placing: Placing | None) -> None: ...
    def cut_all(self) -> None: ...
    def stop(self) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def clients(self) -> list[int]:
        """Return the open connections of clients by thread."""

    def unread(self) -> int:
        """Return how many clients have not taken all of a response that is whole."""
    def held_bytes(self) -> int:
        """Return the bytes of bodies of requests that no event has reported."""
    def hold_elsewhere(self, size: int) -> None:
        """Count *size* bytes as held by Python from now on, in place of those told before."""

class Books:
    """What all decisions of a process read, and all requests write; with the mirror that is made on
    them."""

    def __init__(self) -> None: ...
    def cache_id(self, replica: str, dp_rank: int) -> int: ...
    def cache_ids_of(self, replica: str) -> list[int]: ...
    def cache_of(self, id: int) -> tuple[str, int]: ...
    def load_of(self, replica: str) -> _Load: ...
    def look_at(self, replica: str) -> _Load: ...
    def others_at(self, replica: str) -> _Load: ...
    def loads_of_ranks(self, replica: str, dp_ranks: Sequence[int]) -> list[_Load]: ...
    def places(self) -> list[tuple[str, int | None, _Load]]: ...
    def take_others(self, loads: Sequence[tuple[str, int | None, _Load]]) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...

class Flight:
    """One request's share of the load. Steps say whether they had an effect."""

    def __init__(
        self,
        books: Books,
        replica: str,
        uncached_tokens: int,
        prompt_tokens: int,
        dp_rank: int | None,
    ) -> None: ...
    def first_token(self) -> bool: ...
    def generated(self, tokens: int) -> bool: ...
    def retried(self, replica: str, uncached_tokens: int, dp_rank: int | None) -> bool: ...
    def ended(self) -> bool: ...

class TokenIdsRequest:
    """One request for token ids, until it ends."""

    def __init__(self, books: Books, replica: str) -> None: ...
    def ended(self) -> None: ...

class Policy:
    """A built-in policy alone."""

    def delays(
        self,
        prompt_tokens: int,
        candidate: Candidate,
        prefill_tokens_per_s: float,
        mean_congestion: float,
    ) -> tuple[float, float, float, float, float]:
        """The parts of the delay there: ahead of the prompt, its own, the machine's, that of those
        behind it, and that of what it evicts."""
    def uncached(self, prompt_tokens: int, candidate: Candidate) -> float:
        """Tokens that count as neither cached there nor to be loaded."""

    def __init__(self, name: str, weights: Weights) -> None: ...
    def order(
        self,
        model: str,
        session: bytes,
        prompt_tokens: int,
        prefill_tokens_per_s: float,
        keys: Sequence[int],
        candidates: list[Candidate],
        draws: Sequence[float],
    ) -> tuple[list[float], list[int], int, float]:
        """Costs, numbers from the best on, the best, and the mean congestion.

        Args:
            model: Of the request, as the next four.
            session: Empty: it has none.
            prompt_tokens: Its length.
            prefill_tokens_per_s: At speed 1.
            keys: Of its prefixes.
            candidates: One at least.
            draws: In place of random numbers, by candidate.
        """

class RecentPrefixes:
    """Which prefixes were just sent to which cache."""

    def __init__(self, books: Books, ttl_s: float, max_entries: int) -> None: ...
    def remember(self, cache: int, keys: Sequence[int], now: float) -> None: ...
    def match(self, keys: Sequence[int], step: int, now: float) -> list[tuple[int, int]]: ...
    def forget(self, cache: int) -> None: ...
    def counts(self) -> tuple[int, int, int]: ...

class Conditions:
    """How a replica is; all versions of a fleet share it."""

    def __init__(self, books: Books) -> None: ...
    def set(self, is_healthy: bool, is_draining: bool, is_removed: bool) -> None: ...
    def set_gate(
        self,
        most_requests: int | None,
        most_prefill_tokens: int | None,
        open_until: float | None,
        probe_until: float,
        backs_off_until: float,
        tenants_back_off_until: Sequence[tuple[str, float]],
        started_at: float | None,
        slow_start_s: float,
    ) -> None: ...
    def set_engine(
        self,
        at: float,
        foreign: int,
        waiting: int,
        ranks: Sequence[tuple[int, int, int]],
        cache_blocks: int | None,
        cache_tokens: int | None,
    ) -> None: ...
    def set_lost(self, suspects: Sequence[int], since: Sequence[tuple[int, float]]) -> None:
        """Of which ranks events were lost.

        Args:
            since: Of those for which an estimate may stand in, by the clock.
        """

class Fleet:
    """Which replicas exist; never changes.

    Each is its id, speed, limit of requests, address for peers, models, adapters, caches - with the
    rank, the id, and the source's number in *index* of each - and `Conditions`.
    """

    def __init__(
        self,
        books: Books,
        version: int,
        index: SharedIndex | None,
        replicas: Sequence[
            tuple[
                str,
                float,
                int | None,
                tuple[str, int] | None,
                Sequence[str],
                Sequence[tuple[str, str]],
                Sequence[tuple[int, int, int | None]],
                Conditions,
            ]
        ],
    ) -> None: ...

class DecidedRanking:
    """What a decision found. Numbers are those of candidates that can take the request."""

    def __len__(self) -> int: ...
    def first(self) -> int: ...
    def has_failed(self) -> bool: ...
    def prefill_tokens_per_s(self) -> float: ...
    def mean_congestion(self) -> float: ...
    def numbers(self) -> list[int]: ...
    def cost(self, number: int) -> float: ...
    def candidate(self, number: int) -> tuple[Any, ...]: ...
    def columns(self) -> tuple[Any, ...]:
        """Of `router.policies.Standings`, but the last."""
    def lower(self, number: int) -> tuple[Any, ...]:
        """A `router.policies.Lower`."""
    def excluded(self) -> list[tuple[tuple[Any, ...], int]]: ...

class Decider:
    """Decides by one policy."""

    def __init__(
        self,
        books: Books,
        policy: str,
        weights: Weights,
        engine_load_stale_after_s: float,
        seed: int,
        plug_in_needs_outlook: bool = False,
    ) -> None:
        """An empty name: a plug-in decides, by the columns of what is found."""
    def share_lots(self) -> None: ...
    def use_recent(self, recent: RecentPrefixes) -> None: ...
    def decisions(self) -> int:
        """Made so far, by whomever."""
    def give_lots(self, ties: Sequence[float], lots: Sequence[float]) -> None: ...
    def rank(
        self,
        fleet: Fleet,
        model: str,
        in_mirror: int,
        session: bytes,
        tenant: str,
        prompt_tokens: int,
        index: SharedIndex | None,
        prompts: list[Prompt],
        computed: Sequence[Sequence[_ComputedHashes]],
        choice: tuple[bool, int | None, bool],
        now: float,
        costs_of_ranks: Callable[[Any, list[tuple[Any, ...]]], Sequence[float]] | None,
    ) -> DecidedRanking: ...
