"""Decides where one request should go, and why: once, and again for each attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from router.config.origin import Header
from router.errors import KeyLimitReached, NoReplica
from router.fleet.gate import PASSING, TENANT_BACKING_OFF
from router.fleet.replica import IsEligible, Replica
from router.index.base import SourceId
from router.index.mirror_types import STEP
from router.index.prompt import HashedPrompt
from router.plane.attempts import (
    PREFILLER_HEADER,
    RANK_HEADER,
    SOURCE_HEADER,
    Attempt,
    PrefillStep,
)
from router.policies.reasons import empty_reason
from router.policies.types import Candidate, Ranked
from router.prompt.body.owned_fields import HintForm, with_hints, with_priority, with_source
from router.prompt.body.splicing import with_model
from router.prompt.body.transfer_fields import for_prefiller, with_handed_over
from router.prompt.prompts import PromptSpec, TokenizedPrompt
from router.routing.model import Model
from router.routing.question import Placement, RankQuestion, uncached_tokens
from router.routing.steering import NO_HINTS, ContinuationSign, Hints

ANY_MODEL = "any"
"""Stands for the model where a request names none and need not."""
_BYTES_OF_A_TOKEN = 4


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as each is read: its body and the model that it names."""

    body: bytes
    """The body to send: the client's, without the report mode and with the salt of its key."""
    model: Model | None
    """None for a request that names none, where any of several would do."""
    spec: PromptSpec | None = None
    """None for a request without a prompt to generate from, as `/tokenize`."""
    session: str | None = None
    dp_rank: int | None = None
    tenant: str = ""
    """The tenant of the request, where there may be several."""
    named: str | None = None
    """The model or adapter, as the client names it."""
    target: str | None = None
    """The version that was chosen, where that name stands for several."""
    rename: Callable[[bytes, str], bytes] = with_model
    """Puts another model's name into the body."""

    def name_at(self, replica: Replica) -> str | None:
        """Return the replica's name of the model; None if it is the client's."""
        named, target = self.named, self.target
        if not named or (target is None and replica.serves(named)):
            return None
        if target is not None and replica.serves(target):
            return target
        others = () if self.model is None else self.model.names
        return next((name for name in others if name in replica.served.models), target)


class Asked(ModelRequest, frozen=True, kw_only=True):
    """A request with a prompt to generate from."""

    model: Model
    spec: PromptSpec
    lora_name: str | None
    is_eligible: IsEligible | None = None

    def steer(self, keys: Sequence[int], prompt: TokenizedPrompt) -> Hints:
        """Record its one prompt, with the keys of its prefixes; return what to keep of it."""
        sign = ContinuationSign.NONE if self.session is None else ContinuationSign.SESSION
        sign = ContinuationSign.RETENTION if self.spec.keeps_prompt else sign
        return self.model.steering.hints(keys, prompt.token_ids, prompt.ends, self.tenant, sign)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A request's replicas, best first, with the reasons and all that is needed to send it."""

    asked: ModelRequest
    tokenized: Sequence[TokenizedPrompt] = ()
    question: RankQuestion
    """The question that replicas were ranked for; its prompts are the hashed ones of
    *tokenized*."""
    policy: str
    ranking: Sequence[Ranked]
    """Best first; empty where no replica can take the request now."""
    excluded: Sequence[Candidate]
    """Replicas that cannot take it now, each with its obstacle."""
    replicas: Mapping[str, Replica]
    """All that serve the model, by id. One may be removed while the request is under way: it is
    tried all the same."""
    expects: Callable[[RankQuestion, SourceId, int], int]
    """Returns how much of the prompts will be cached when the engine admits the request."""
    obstacle_of: Callable[[Replica, str], str | None]
    """Returns why a replica cannot take a request of a tenant at this moment; None if it can."""
    tokenization_s: float | None = None
    """From the parsed request to its token ids; None without a prompt."""
    routing_s: float
    """From there to the ranking."""
    prefillers: Mapping[str, Replica]
    """Replicas that serve the model and only compute prompts for others; by id."""
    prefiller_for: Callable[[Candidate], Candidate | None]
    """Returns the replica that computes the prompt for a candidate; None: itself."""

    def __repr__(self) -> str:
        # Bodies and prompts stay out of logs.
        return f"Decision({self.model_name}, {self.policy}, {len(self.ranking)} ranked)"

    @property
    def prompts(self) -> Sequence[HashedPrompt]:
        """The hashed prompts of *tokenized*."""
        return self.question.prompts

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, as far as their ids are known."""
        return self.question.prompt_tokens

    @property
    def tenant(self) -> str:
        return self.question.tenant

    @property
    def model_name(self) -> str:
        """The model's name for logs, metrics and messages."""
        return self.question.request.model

    @property
    def may_wait(self) -> bool:
        """Return whether some replica that has no room now will have it again before long."""
        return any(candidate.obstacle in PASSING for candidate in self.excluded)

    @property
    def tokens(self) -> int:
        """Prompt tokens; by the body's size where their ids are not known."""
        spec = self.asked.spec
        if self.prompt_tokens or spec is None:
            return self.prompt_tokens
        return spec.body_bytes // _BYTES_OF_A_TOKEN

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens to compute, at the best replica, or where all are full, at the one that has
        most of them cached."""
        candidates = [self.ranking[0].candidate] if self.ranking else self.excluded
        return self.tokens - max(each.cached_tokens for each in candidates)

    @property
    def lane(self) -> str:
        """Requests of a model that have the same lane can be served by the same replicas."""
        asked = self.asked
        where = "".join(f" not at {replica_id}" for replica_id in self.refused_at)
        if not isinstance(asked, Asked) or asked.spec.stored_response is not None:
            return where if len(self.replicas) != 1 else f"at {next(iter(self.replicas))}"
        if asked.is_eligible is not None:
            where = f" among {' '.join(sorted(self.replicas))}{where}"
        return where if asked.lora_name is None else f"for {asked.lora_name}{where}"

    @property
    def refused_at(self) -> tuple[str, ...]:
        """The replicas that took nothing more of its tenant when it was decided."""
        return tuple(
            each.replica_id for each in self.excluded if each.obstacle == TENANT_BACKING_OFF
        )

    def is_comparable_at(self, candidate: Candidate) -> bool:
        """Return whether the engine's `cached_tokens` will count the same as the prediction."""
        spec = self.asked.spec
        return (
            spec is not None
            and spec.choices == 1
            and len(self.tokenized) == 1
            and self.tokenized[0].exact
            and (self.reads_rank or not self.replica_of(candidate).has_ranks)
        )

    @property
    def reads_rank(self) -> bool:
        """Return whether the engine is sure to read the data-parallel rank that it is asked for."""
        return self.question.choice.is_read

    def certain_source_of(self, candidate: Candidate) -> SourceId | None:
        """The cache that the request will meet at *candidate*; None if the engine chooses."""
        replica = self.replicas[candidate.replica_id]
        if replica.has_ranks and (candidate.dp_rank is None or not self.reads_rank):
            return None
        return replica.cache_at(candidate.dp_rank)

    def placement(self, candidate: Candidate, attempt: Attempt) -> Placement:
        uncached = uncached_tokens(self.prompt_tokens, candidate)
        return Placement(
            self.question,
            candidate,
            self.certain_source_of(candidate),
            0 if attempt.prefiller is not None else uncached,
            attempt.keep,
        )

    def prefill_placement(self, prefiller: Candidate) -> Placement:
        """Where another replica computes the prompt."""
        replica = self.replica_of(prefiller)
        source = None if replica.has_ranks else replica.cache  # else its engine chooses the cache
        uncached = uncached_tokens(self.prompt_tokens, prefiller)
        return Placement(self.question, prefiller, source, uncached)

    def ranked(self, replica_id: str) -> Ranked:
        """The entry of a replica in the ranking; of one that was left out, an entry behind all."""
        if self.ranking and self.ranking[0].candidate.replica_id == replica_id:
            return self.ranking[0]  # without a look at the others, which are made only then
        for entry in self.ranking:
            if entry.candidate.replica_id == replica_id:
                return entry
        excluded = next(each for each in self.excluded if each.replica_id == replica_id)
        return Ranked(excluded, math.inf, f"{excluded.obstacle} when it was ranked, able since")

    def source_of(self, candidate: Candidate) -> SourceId:
        """The cache whose hit *candidate* stands for."""
        return self.replicas[candidate.replica_id].cache_at(candidate.dp_rank)

    def expected_tokens(self, candidate: Candidate) -> int:
        """Prompt tokens that will be cached at *candidate* when the engine admits the request."""
        source, hit = self.source_of(candidate), candidate.cached_tokens
        return self.expects(self.question, source, hit)

    def replica_of(self, candidate: Candidate) -> Replica:
        """The replica of a candidate, for the response or for the prompt."""
        name = candidate.replica_id
        return self.prefillers[name] if name in self.prefillers else self.replicas[name]

    def attempts(
        self,
        shows_hit: bool = True,
        number_of: Callable[[int], int] | None = None,
        hands_over: bool = False,
    ) -> Iterator[Attempt]:
        """Yield the attempts, best first: where to send the request, with which headers.

        Each is chosen when it is asked for, by how the replicas are at that moment:

            ranked, and able now            in their order
            left out, and able now          after those
            ranked, and unhealthy now       last, or removed
            draining, or at its limit now   not at all

        Only for the first may another replica compute the prompt: if that fails, it may be the
        cause.

        Args:
            shows_hit: True if the client sees how much of its prompt is cached.
            number_of: The number of a request that has so many tokens to compute, for engines that
                order what waits there; lower goes first. None: they get none.
            hands_over: True if the router has the prompt computed elsewhere by itself; else
                whoever stands before the replica is told to.
        """
        if not self.ranking:
            return
        first = self.ranking[0].candidate
        hints = self._steer(first)
        attempt = self._ordered(self._attempt(first, shows_hit, hints), first, number_of)
        prefiller = self.prefiller_for(first)
        if prefiller is None:
            yield attempt
        else:
            step = None
            if hands_over:
                at = self._attempt(prefiller, shows_hit=False, hints=hints)
                step = self._prefill_step(self._ordered(at, prefiller, number_of))
            yield self._prefilled(attempt, prefiller, step)
        left = [*(entry.candidate for entry in self.ranking[1:]), *self.excluded]
        while (candidate := self._next(left)) is not None:
            left.remove(candidate)
            yield self._ordered(self._attempt(candidate, shows_hit, hints), candidate, number_of)

    def _next(self, left: Sequence[Candidate]) -> Candidate | None:
        last_resort = None
        for candidate in left:
            replica = self.replicas[candidate.replica_id]
            if self.obstacle_of(replica, self.tenant) is None:
                return candidate
            is_gone = replica.removed or not replica.is_healthy
            if last_resort is None and candidate.obstacle is None and is_gone:
                last_resort = None if replica.draining else candidate
        return last_resort

    def _steer(self, first: Candidate) -> Hints:
        """Return the hints for the prompt; called once, since steering records it."""
        asked = self.asked
        if not isinstance(asked, Asked) or len(self.prompts) != 1:
            return NO_HINTS
        model = asked.model
        form = hint_form(model, self.replicas[first.replica_id])
        if form is None or not form.is_read_at(asked.spec.endpoint):
            return NO_HINTS
        prompt = next(each for each in self.tokenized if each.token_ids)
        keys = self.prompts[0].prefix_keys(STEP)
        source, named = self.source_of(first), model.steering.named(keys)
        model.count_outcome(named, source, first.cached_tokens)
        return asked.steer(keys, prompt)

    def _attempt(self, candidate: Candidate, shows_hit: bool, hints: Hints) -> Attempt:
        replica = self.replica_of(candidate)
        headers = replica.headers
        if candidate.dp_rank is not None:
            headers = (*headers, (RANK_HEADER, b"%d" % candidate.dp_rank))
        reported: tuple[Header, ...] = ((b"x-kv-replica", replica.id.encode()),)
        if shows_hit:
            reported = (*reported, (b"x-kv-hit-tokens", b"%d" % candidate.cached_tokens))
            if candidate.is_approximate:
                reported = (*reported, (b"x-kv-hit-approximate", b"true"))
        asked = self.asked
        body, name = asked.body, asked.name_at(replica)
        if name is not None:
            reported = (*reported, (b"x-kv-model", name.encode()))
            body = asked.rename(body, name)
        hinted = body if hints is NO_HINTS else self._with_hints(body, replica, hints)
        body, keep = hinted, hints.keep if hinted is not body else ()
        source = self.replicas.get(candidate.pull_from or "")
        if source is not None and source.peer_address is not None and not source.removed:
            body = with_source(body, *source.peer_address)
            headers = (*headers, (SOURCE_HEADER, source.address.encode("ascii")))
        changed = None if body is asked.body else body
        return Attempt(replica.id, replica.origin, headers, reported, changed, keep)

    def _prefill_step(self, at: Attempt) -> PrefillStep:
        """Return what the replica that computes the prompt gets.

        Args:
            at: The whole request there.
        """
        asked = self.asked
        assert asked.spec is not None  # it has a prompt
        body = for_prefiller(asked.body if at.body is None else at.body, asked.spec.endpoint)
        return PrefillStep(msgspec.structs.replace(at, body=body), with_handed_over)

    def _prefilled(
        self, attempt: Attempt, prefiller: Candidate, step: PrefillStep | None
    ) -> Attempt:
        """Return the attempt with the replica that computes the prompt; without a step, its name is
        in a header."""
        headers = attempt.request_headers
        if step is None:
            address = self.replica_of(prefiller).address.encode("ascii")
            headers = (*headers, (PREFILLER_HEADER, address))
        return msgspec.structs.replace(
            attempt, request_headers=headers, prefiller=prefiller, prefill=step
        )

    def _ordered(
        self, attempt: Attempt, candidate: Candidate, number_of: Callable[[int], int] | None
    ) -> Attempt:
        """Return the attempt with the request's number, where the engine orders by it."""
        replica = self.replica_of(candidate)
        order, spec = replica.priority_order, self.asked.spec
        if order is None or number_of is None or spec is None:
            return attempt
        number = number_of(max(self.tokens - self.expected_tokens(candidate), 0))
        body = self.asked.body if attempt.body is None else attempt.body
        headers, changed = with_priority(
            body,
            spec.endpoint,
            number if order == "lower_first" else -number,
            reads_header=order == "lower_first" and not replica.is_of("sglang"),
        )
        return msgspec.structs.replace(
            attempt,
            request_headers=(*attempt.request_headers, *headers),
            body=attempt.body if changed is body else changed,
        )

    def _with_hints(self, body: bytes, replica: Replica, hints: Hints) -> bytes:
        asked = self.asked
        if not isinstance(asked, Asked):
            return body
        form = hint_form(asked.model, replica)
        return body if form is None else with_hints(body, asked.spec.endpoint, form, *hints)

    def require_replica(self) -> None:
        """Refuse the request, with the reasons counted, if the ranking is empty.

        Raises:
            NoReplica: The ranking is empty.
            KeyLimitReached: It is empty since all that could serve it take nothing more of its
                tenant.
        """
        if not self.ranking:
            able = [
                replica
                for replica in self.replicas.values()
                if replica.is_healthy and not replica.draining
            ]
            opens_in_s = [replica.gate.opens_in_s(self.tenant) for replica in able]
            retry_after_s = max(1, math.ceil(min(opens_in_s, default=0)))
            if able and len(self.refused_at) == len(able):
                raise KeyLimitReached("requests at the replicas", retry_after_s)
            reason = empty_reason(self.excluded)
            if not self.replicas and self.prefillers:
                reason = f"{len(self.prefillers)} of role prefill"
            raise NoReplica(self.model_name, reason, retry_after_s)


def hint_form(model: Model, replica: Replica) -> HintForm | None:
    """The form of retention hints to a replica; None if it gets none.

    A replica takes hints if its `GET /server_info` or its event stream announces that.
    """
    if model.retention_hints == "never":
        return None
    if model.retention_hints == "auto" and not replica.server_info.retention_hints:
        announced = model.index.announced(replica.cache)
        if announced is None or not announced.retention_hints:
            return None
    return HintForm.VLLM if replica.is_of("vllm") else HintForm.KVROUTE
