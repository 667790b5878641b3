"""One proxied request observed: load, health, metrics, its line in the log, and its prediction
compared with what the engine reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from typing_extensions import override

from router.errors import KeyLimitReached, NoReplica, Overloaded, RequestError
from router.feed.taps import Tap, Taps
from router.fleet.registry import ReplicaRegistry
from router.plane.attempts import OWN_LIMITS, RETRIED, Attempt, Failure, Unretried, failure_of
from router.plane.exchanges import FailedFirst
from router.plane.proxy_types import End, ProxyObserver, is_error
from router.plane.usage import ResponseIdReader, UsageReader
from router.policies.types import Candidate
from router.prompt.endpoints import FORMS, Endpoint
from router.routing.booking import Booking, Bookings
from router.routing.decision import Decision
from router.routing.question import Placement
from router.routing.stored_responses import StoredResponses
from router.telemetry.metrics import REMOVED, RouterMetrics, ServedMetrics
from router.telemetry.observed_prefill import ObservedPrefill
from router.telemetry.request_log import RequestLog, RoutedRequest
from router.telemetry.self_repair import Comparison, SelfRepair
from router.telemetry.settled import Comparisons, RequestSum, Settled
from router.telemetry.shortages import Shortages
from router.telemetry.spans import RequestTrace

# A 500 may be the request's own fault: were it held against the replica, one client could empty the
# fleet. A kept connection may be closed for its age. The last two follow from checks that failed.
_NOT_HELD_AGAINST_IT = frozenset(
    (Failure.SERVER_ERROR, Failure.KEPT_CLOSED, Failure.BUSY, Failure.UNHEALTHY, Failure.LOST)
)
# The sidecar of a replica whose prompts are computed elsewhere responds with the status from there.
_PASSED_ON = frozenset((Failure.UNAVAILABLE, Failure.SERVER_ERROR))
_CACHE_IS_THERE = frozenset((Failure.KEPT_CLOSED, Failure.BUSY, Failure.LATE))


@dataclass(slots=True, eq=False)
class RequestObservers:
    """Makes the observer of each request, and knows what they all report to."""

    bookings: Bookings
    """Book requests where they are sent."""
    metrics: RouterMetrics
    replicas: ReplicaRegistry
    """Learns which of them failed and which served."""
    log: RequestLog
    responses: StoredResponses
    """Learns who has which stored response."""
    repair: SelfRepair
    """Judges the sources by how they were predicted."""
    shortages: Shortages
    """Learns when memory is short."""
    taps: Taps
    """Record the caches that requests are sent to."""
    reporting: set[str] = field(default_factory=set)
    """Replicas whose responses have reported cached tokens at least once."""
    _shown: dict[int, RoutedRequest] = field(default_factory=dict)
    """Requests that the data plane has decided, and that are logged before their end."""

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic, in seconds."""
        return self.bookings.clock

    def observe(
        self, decision: Decision, path: str, request_id: str, trace_id: str | None = None
    ) -> RequestObserver:
        """Log a request that has been decided on, and make its observer.

        Raises:
            NoReplica: The ranking is empty; the request is logged as refused.
            KeyLimitReached: The same, since replicas take nothing more of its tenant.
        """
        self.metrics.decided(decision.model_name, decision.tokenization_s, decision.routing_s)
        if decision.asked.target is not None:
            self.metrics.versions.labels(decision.asked.named or "", decision.asked.target).inc()
        request = routed(decision, path, request_id, trace_id)
        try:
            decision.require_replica()
        except (NoReplica, KeyLimitReached) as error:
            self.log.add_refused(request, error)
            raise
        spec = decision.asked.spec
        if spec is not None and spec.has_report_mode:
            self.metrics.report_modes.labels().inc()
        self.log.add(request)
        return RequestObserver(self, decision, request)

    def kind_of(self, failed: FailedFirst) -> Failure:
        """Return how a replica failed a request that the data plane had decided."""
        if failed.failure is not None:
            return failure_of(failed.failure)
        is_busy = failed.retry_after_s is not None and self.replicas.backs_off
        return Failure.BUSY if is_busy else Failure.UNAVAILABLE

    def handed_over(self, number: int, failed: FailedFirst, tenant: str) -> Failure:
        """A replica did not serve a request that the data plane had decided. It is decided anew.

        Args:
            number: The request's, in the data plane.
            failed: How it failed.
            tenant: The one that it refused, where it distinguishes tenants.
        Returns:
            How it failed.
        """
        self.forget(number)
        found = self.kind_of(failed)
        if failed.failure is None and failed.retry_after_s is not None:
            self.replicas.report_busy(failed.replica, failed.retry_after_s, tenant)
        if failed.failure not in OWN_LIMITS:
            self.failed(failed.replica, found)
        return found

    def failed(self, replica_id: str, failure: Failure, is_its_own: bool = True) -> bool:
        """A replica failed; return whether it is out of rotation.

        Args:
            replica_id: Who; may have been removed since.
            is_its_own: Whether it is sure to be the cause.
        """
        if failure in RETRIED and replica_id in self.replicas:
            self.metrics.retries.labels(replica_id, failure.value).inc()
            if is_its_own and failure not in _CACHE_IS_THERE:
                self.bookings.visits.forget(replica_id)
        if is_its_own and failure not in _NOT_HELD_AGAINST_IT:
            self.replicas.report_failure(replica_id, failure.value)
        return not self.replicas.is_healthy(replica_id)

    def forget(self, number: int) -> None:
        """Show no more of a request that the data plane has decided."""
        shown = self._shown.pop(number, None)
        if shown is not None:
            self.log.forget(shown)

    def show(self, number: int, settled: Settled, path: str, policy: str) -> RoutedRequest:
        """Log a request that the data plane has decided and that is still being served.

        Returns:
            As the log shows it.
        """
        request = self._shown.get(number)
        if request is None:
            request = self._shown[number] = self._logged(settled, path, policy)
        request.first_byte_s = settled.first_byte_s or None
        self.log.update(request)
        return request

    def _logged(self, settled: Settled, path: str, policy: str) -> RoutedRequest:
        """A new line of the log for a request that the data plane has decided, which is counted."""
        self.metrics.decided(settled.model, settled.asked.tokenization_s, settled.routing_s)
        prompt_tokens, _, _, expected_tokens = settled.tokens
        request = RoutedRequest(
            request_id=settled.request_id,
            trace_id=settled.trace_id,
            path=path,
            model=settled.model,
            policy=policy,
            stream=settled.asked.stream,
            prompt_tokens=prompt_tokens,
            unknown=None,
            replica=settled.replica,
            dp_rank=settled.dp_rank,
            attempts=1,
            candidate=settled.candidate,
            expected_tokens=expected_tokens,
            why=settled.why,
        )
        self.log.add(request)
        request.arrived_at = round(request.arrived_at - settled.seconds, 3)
        return request

    def settle(self, number: int, settled: Settled, path: str, policy: str) -> RoutedRequest:
        """Count and log a request that was decided and served elsewhere; it is over.

        Returns:
            As the log shows it.
        """
        request = self._shown.pop(number, None) or self._logged(settled, path, policy)
        is_known = settled.replica in self.replicas
        served = self.metrics.served(
            settled.model,
            "none" if not settled.first_byte_s else settled.replica if is_known else REMOVED,
        )
        if settled.first_byte_s and is_known:
            request.first_byte_s = settled.first_byte_s
            self.replicas.report_served(settled.replica)
            served.began(settled.first_byte_s, settled.exemplar)
        if (failure := settled.last_failure) is not None:
            request.last_failure = request.last_failure or failure.value
            if failure not in _NOT_HELD_AGAINST_IT:
                self.replicas.report_failure(settled.replica, failure.value)
        request.status, request.end = settled.status or None, settled.end
        request.seconds = settled.seconds
        served.ended(policy, request.status, settled.seconds, settled.exemplar)
        self.metrics.ends.labels(settled.end).inc()
        is_whole = settled.end == End.COMPLETED.value and settled.status == 200
        if is_whole and is_known and settled.asked.is_comparable:
            actual = self.compare(request, settled.replica, settled.usage_reader, served)
            if actual is not None and settled.approximate_trust is None:
                self._judge(settled, request.cached_tokens, actual)
        self.log.finish(request)
        return request

    def add(self, summed: RequestSum, policy: str) -> None:
        """Count requests that were decided and served elsewhere, and that are not logged."""
        model, replica = summed.model, summed.replica
        is_known = replica in self.replicas
        served = self.metrics.served(model, replica if is_known else REMOVED)
        served.add(summed, policy)
        self.metrics.ends.labels(End.COMPLETED.value).inc(summed.requests)
        compared: list[Comparisons] = []
        if is_known:
            self.replicas.report_served(replica)
            label = self.metrics.label_of(model)
            self.metrics.first_byte.labels(label, replica).add(summed.first_byte_s)
            if summed.reported.requests:
                self.reporting.add(replica)
            compared = [summed.reported, *([summed.silent] if replica in self.reporting else [])]
        for each in compared:
            if each.requests:
                served.add_compared(each)
        self.log.add_sum(summed, compared)

    def compare(
        self, request: RoutedRequest, replica_id: str, usage: UsageReader, served: ServedMetrics
    ) -> int | None:
        """Compare a prediction with what the engine reported; return that, or None."""
        actual = request.actual_tokens = self.cached_tokens(usage, replica_id)
        if actual is None:
            return None
        compare_with(served, request.candidate, actual, request.prompt_tokens)
        if request.candidate.is_approximate:
            return actual
        if request.expected_tokens is not None:
            served.compare_expected(request.expected_tokens, actual)
        return actual

    def _judge(self, settled: Settled, predicted: int, actual: int) -> None:
        was_quiet = settled.was_alone and self.repair.quiet.was_quiet(
            settled.replica, settled.began_at
        )
        if was_quiet and not settled.suspect:
            source = self.replicas.get(settled.replica).cache_at(settled.dp_rank)
            comparison = Comparison(
                self.clock(),
                predicted,
                actual,
                has_salt=settled.asked.has_salt,
                has_adapter=settled.asked.has_adapter,
            )
            self.repair.compare(settled.model, source, comparison)

    def cached_tokens(self, reader: UsageReader, replica_id: str) -> int | None:
        """Return what an engine reported as cached. vLLM leaves a zero out, so from a replica that
        has ever reported cached tokens, silence means zero."""
        usage = reader.usage()
        if usage.cached_tokens is not None:
            self.reporting.add(replica_id)
        elif usage.prompt_tokens is not None and replica_id in self.reporting:
            return 0
        return usage.cached_tokens

    def refused(self, error: RequestError) -> None:
        """Count a request that ends with one of the router's own errors."""
        self.metrics.bad_requests.labels(error.code).inc()
        if error.status >= 500:
            self.log.count_failure()

    def out_of_memory(self) -> Overloaded:
        """Note that there was no memory for a request; return what its client is to see."""
        self.shortages.note("memory")
        return Overloaded("is out of memory")

    def client_left(self) -> None:
        """Count a request whose client left before all of it had arrived."""
        self.metrics.bad_requests.labels("client_gone").inc()

    def forget_replica(self, replica_id: str) -> None:
        """Drop the series of a replica that was removed."""
        self.reporting.discard(replica_id)
        self.repair.forget(replica_id)
        self.metrics.forget("replica", replica_id)

    def forget_model(self, model: str) -> None:
        """Drop the series of a model that no replica serves any more."""
        self.metrics.forget("model", model)


@dataclass(slots=True, eq=False)
class RequestObserver(ProxyObserver):
    """Observes one request."""

    _of_all: RequestObservers
    decision: Decision
    request: RoutedRequest
    """The request in the log."""
    waited_s: float = 0.0
    """For room at a replica, before it was sent."""
    usage: UsageReader = field(default_factory=UsageReader)
    """Reads what the response reports."""
    exemplar: str | None = None
    """The id of its trace, where that is recorded."""
    _trace: RequestTrace | None = None
    """The trace, which records its attempts."""
    _queries: tuple[tuple[Tap, int], ...] = ()
    _booking: Booking | None = None
    """From the first time that it is sent."""
    _prefill: ObservedPrefill | None = None
    """Its prompt, where another replica computes it."""
    _response_id: ResponseIdReader | None = None
    _events: int = 0
    _responded: str | None = None

    def __post_init__(self) -> None:
        spec = self.decision.asked.spec
        if spec is not None and spec.endpoint is Endpoint.RESPONSES:
            self._response_id = ResponseIdReader()

    def record_in(self, trace: RequestTrace) -> None:
        """Record its attempts in a trace, if that is recorded."""
        if trace.is_sampled:
            self._trace, self.exemplar = trace, trace.trace_id
            trace.request, trace.usage = self.request, self.usage

    @override
    def on_tried(self, failed: FailedFirst) -> tuple[Failure, bool]:
        found = self._of_all.kind_of(failed)
        request = self.request
        request.attempts += 1
        request.last_failure = found.value
        request.arrived_at = round(request.arrived_at - failed.seconds, 3)
        return found, not self._of_all.replicas.is_healthy(failed.replica)

    @override
    def on_attempt(self, attempt: Attempt) -> None:
        of_all, decision = self._of_all, self.decision
        ranked = decision.ranked(attempt.replica_id)
        at = decision.placement(ranked.candidate, attempt)
        self._prefill_at(attempt.prefiller)
        if self._booking is None:
            self._booking = of_all.bookings.book(at)
        else:
            self._booking.retried(at)
        of_all.replicas.report_sent(attempt.replica_id)
        self._queries = self._recorded(at) if of_all.taps else ()
        self.request.sent_to(ranked)
        if self._booking.expected_tokens is not None:
            self.request.expected_tokens = self._booking.expected_tokens
        of_all.log.update(self.request)
        if self._trace is not None:
            self._trace.sent(attempt, self.request.cached_tokens)

    @override
    def on_failure(self, attempt: Attempt, failure: Failure) -> bool:
        if self._trace is not None:
            self._trace.failed(failure)
        self.request.last_failure = failure.value
        prefill = self._prefill
        if prefill is None or prefill.has_responded or failure not in _PASSED_ON:
            return self._of_all.failed(attempt.replica_id, failure)
        self._of_all.replicas.mark_suspect(prefill.candidate.replica_id)
        return self._of_all.failed(attempt.replica_id, failure, is_its_own=False)

    @override
    def on_prefilled(self, response: bytes) -> None:
        prefill = self._prefill
        if prefill is None:
            return
        self._of_all.replicas.report_served(prefill.candidate.replica_id)
        usage = UsageReader()
        usage.take(True, response, b"")
        prefill.responded(self._compare_prefill(prefill.candidate, usage))
        self._of_all.log.update(self.request)

    @override
    def on_unprefilled(self, attempt: Attempt, failure: Failure | None) -> None:
        prefill, booking = self._prefill, self._booking
        if prefill is None or booking is None:
            return
        if failure is not None:
            self.request.last_failure = failure.value
            self._of_all.failed(prefill.candidate.replica_id, failure)
        self._prefill_at(None)
        ranked = self.decision.ranked(attempt.replica_id)
        booking.retried(self.decision.placement(ranked.candidate, attempt))
        self._of_all.log.update(self.request)

    @override
    def is_at_ease(self, attempt: Attempt) -> bool:
        return self._of_all.replicas.is_at_ease(attempt.replica_id)

    @override
    def on_busy(self, attempt: Attempt, retry_after_s: int, is_429: bool) -> bool:
        tenant = self.decision.tenant if is_429 else ""
        self._of_all.replicas.report_busy(attempt.replica_id, retry_after_s, tenant)
        return self._of_all.replicas.backs_off

    @override
    def on_unretried(self, reason: Unretried) -> None:
        self._of_all.metrics.unretried.labels(reason.value).inc()

    @override
    def on_first_byte(
        self, attempt: Attempt, seconds: float, status: int, is_whole: bool | None = None
    ) -> None:
        if self._trace is not None:
            self._trace.began_response()
        replica_id = self._responded = attempt.replica_id
        seconds += self.waited_s
        was_computed = not is_error(status)
        is_timed = not (self._is_generated_whole if is_whole is None else is_whole)
        if self._booking is not None and was_computed:
            self._booking.first_token(is_timed)
        if self._prefill is not None:
            if was_computed:
                self._prefill.response_began(is_timed)
            self._prefill.ended(was_computed)
        self.request.first_byte_s = seconds
        self._of_all.log.update(self.request)
        self._of_all.replicas.report_served(replica_id)
        if replica_id in self._of_all.replicas:
            self._of_all.metrics.served(self.decision.model_name, replica_id).began(
                seconds, self.exemplar
            )

    def on_chunk(self, data: bytes) -> None:
        """A piece of the body, which a gateway passes on."""
        self.on_beginning(data)
        usage = self.usage
        usage.feed(data)
        if usage.data_events > self._events and self._booking is not None:
            self._booking.generated(usage.data_events - self._events)
            self._events = usage.data_events

    @property
    @override
    def wants_beginning(self) -> bool:  # type: ignore[override]
        return self._response_id is not None

    @override
    def on_beginning(self, data: bytes) -> None:
        if self._response_id is not None and (found := self._response_id.feed(data)):
            self._of_all.responses.learn(found, self._responded or "")

    @override
    def on_events(self, count: int) -> None:
        self._events += count
        if self._booking is not None:
            self._booking.generated(count)

    @override
    def on_usage(self, is_json: bool, last: bytes, first: bytes) -> None:
        self.usage.take(is_json, last, first)

    @override
    def on_end(self, end: End, status: int | None, seconds: float) -> None:
        if self._trace is not None:
            self._trace.ended_response()
        booking = self._booking
        was_quiet = booking is not None and booking.ended(not is_error(status))
        if self._prefill is not None:
            self._prefill.ended()
        decision, metrics, request = self.decision, self._of_all.metrics, self.request
        seconds += self.waited_s
        served = metrics.served(decision.model_name, self._label())
        served.ended(decision.policy, status, seconds, self.exemplar)
        request.status, request.end = status, end.value
        request.seconds = seconds
        metrics.ends.labels(request.end).inc()
        if booking is not None:
            if end is End.COMPLETED and status == 200:
                self._compare(booking.placement, was_quiet, served)
            booking.reported(request.actual_tokens)
        self._of_all.log.finish(self.request)

    def response_tokens(self) -> int | None:
        """Return the tokens that the engine reported, or else about one for each event; None
        without a response."""
        if self._responded is None:
            return None
        reported = self.usage.usage().completion_tokens
        return self._events if reported is None else reported

    def _prefill_at(self, prefiller: Candidate | None) -> None:
        """Another replica computes its prompt; None: no other, or no other any more."""
        before = self._prefill
        if prefiller is (None if before is None else before.candidate):
            return
        if before is not None:
            before.ended()
        self._prefill = None
        if prefiller is not None:
            of_all, decision = self._of_all, self.decision
            of_all.metrics.prefills.labels(decision.model_name, prefiller.replica_id).inc()
            booking = of_all.bookings.book_prefill(decision.prefill_placement(prefiller))
            self._prefill = ObservedPrefill(booking)
            of_all.replicas.report_sent(prefiller.replica_id)
        self.request.prefiller = None if prefiller is None else prefiller.replica_id

    def _compare_prefill(self, candidate: Candidate, usage: UsageReader) -> int | None:
        """Compare the prediction for the replica that has computed the prompt with what that
        reported; return that, or None."""
        of_all, name, request = self._of_all, candidate.replica_id, self.request
        if name not in of_all.replicas or not self.decision.is_comparable_at(candidate):
            return None
        actual = of_all.cached_tokens(usage, name)
        served = of_all.metrics.served(self.decision.model_name, name)
        if actual is not None:
            compare_with(served, candidate, actual, request.prompt_tokens)
        request.prefiller_cached_tokens = candidate.cached_tokens
        request.prefiller_actual_tokens = actual
        return actual

    @property
    def _is_generated_whole(self) -> bool:
        """Return whether its response begins once all of it is generated."""
        spec = self.decision.asked.spec
        return spec is not None and not spec.stream and FORMS[spec.endpoint].generates

    def _label(self) -> str:
        """The replica that responded. The series of one that was removed meanwhile are gone, and
        must not come back."""
        if self._responded is None:
            return "none"
        return self._responded if self._responded in self._of_all.replicas else REMOVED

    def _compare(self, at: Placement, was_quiet: bool, served: ServedMetrics) -> None:
        replica_id, candidate, source = self._responded, at.candidate, at.source
        if replica_id is None or replica_id not in self._of_all.replicas:
            return
        if not self._is_comparable_at(candidate):
            return
        actual = self._of_all.compare(self.request, replica_id, self.usage, served)
        if actual is None:
            return
        for tap, number in self._queries:
            tap.hit(number, actual)
        is_judged = was_quiet and not candidate.suspect and not candidate.is_approximate
        if is_judged and source is not None:
            self._of_all.repair.compare(self.decision.model_name, source, self._comparison(actual))

    def _is_comparable_at(self, candidate: Candidate) -> bool:
        """Return whether the response will report what was cached where it was sent; not what came
        there from the replica that computed the prompt."""
        return self._prefill is None and self.decision.is_comparable_at(candidate)

    def _comparison(self, actual: int) -> Comparison:
        prompt = self.decision.tokenized[0]
        return Comparison(
            self._of_all.clock(),
            self.request.cached_tokens,
            actual,
            has_salt=prompt.cache_salt is not None,
            has_adapter=prompt.lora_name is not None,
            has_media=prompt.extra_keys is not None,
        )

    def _recorded(self, at: Placement) -> tuple[tuple[Tap, int], ...]:
        """Give the prompt to the taps that record its cache, where that is certain and the engine's
        report will be comparable."""
        decision = self.decision
        taps = () if at.source is None else self._of_all.taps.of(at.source)
        if not (taps and decision.prompts and self._is_comparable_at(at.candidate)):
            return ()
        prompt = decision.tokenized[0]
        asked = prompt.token_ids, prompt.cache_salt, prompt.lora_name, prompt.extra_keys
        return tuple((tap, tap.query(*asked)) for tap in taps)


def compare_with(
    served: ServedMetrics, candidate: Candidate, actual: int, prompt_tokens: int
) -> None:
    """Count how a prediction compares with what the engine reported."""
    if candidate.is_approximate:
        served.compare_approximate(candidate.cached_tokens, actual)
    else:
        served.compare(candidate.cached_tokens, actual, candidate.by_tier, prompt_tokens)


def routed(decision: Decision, path: str, request_id: str, trace_id: str | None) -> RoutedRequest:
    """The request as the log shows it before it is sent."""
    unknown = None
    for prompt in decision.tokenized:
        unknown = unknown or prompt.reason
    return RoutedRequest(
        request_id=request_id,
        path=path,
        model=decision.model_name,
        policy=decision.policy,
        stream=decision.asked.spec is not None and decision.asked.spec.stream,
        prompt_tokens=decision.prompt_tokens,
        unknown=unknown,
        trace_id=trace_id,
    )
