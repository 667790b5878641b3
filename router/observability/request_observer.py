"""One proxied request on the books: load, health, metrics, and the prediction held against the
truth."""

from __future__ import annotations

from router.errors import UnknownReplica
from router.observability.metrics import RouterMetrics
from router.observability.request_log import Journal, RoutedRequest
from router.proxy import RETRIED, Attempt, End, Failure, Outcome
from router.proxy.usage import UsageReader
from router.replicas import ReplicaRegistry
from router.replicas.load import InFlight, LoadTracker
from router.routing.dispatcher import Dispatched
from router.routing.planner import Decision, RoutePlanner


class Bookkeeper:
    """What all accounts share."""

    def __init__(
        self,
        load: LoadTracker,
        metrics: RouterMetrics,
        planner: RoutePlanner,
        replicas: ReplicaRegistry,
        journal: Journal,
    ) -> None:
        self.load = load
        self.metrics = metrics
        self.planner = planner
        self.replicas = replicas
        self.journal = journal
        self.tells_cached_tokens: set[str] = set()
        """Replicas whose answers have told their cached tokens at least once."""


class Account:
    """Implements the proxy's `Observer` for one request."""

    def __init__(
        self,
        books: Bookkeeper,
        decision: Decision,
        dispatched: Dispatched | None,
        routed: RoutedRequest,
    ) -> None:
        """*dispatched* is None for requests without a prompt; *routed* is this request's line in
        the journal."""
        self._books = books
        self._decision = decision
        self._dispatched = dispatched
        self._in_flight: InFlight | None = None
        self._usage = UsageReader()
        self._events = 0
        self._routed = routed
        books.journal.opened(routed)

    def on_attempt(self, attempt: Attempt) -> None:
        replica_id = attempt.replica_id
        uncached = self._decision.uncached_tokens(replica_id)
        if self._in_flight is None:
            self._in_flight = self._books.load.started(
                replica_id, uncached, self._decision.prompt_tokens
            )
        else:
            self._in_flight.retried(replica_id, uncached)
        self._books.planner.remember(self._decision, replica_id)
        self._note_attempt(replica_id)

    def on_failure(self, attempt: Attempt, failure: Failure) -> None:
        self._routed.last_failure = failure.value
        if failure in RETRIED and self._knows(attempt.replica_id):
            self._books.metrics.retries.labels(attempt.replica_id, failure.value).inc()
            self._books.planner.forget(attempt.replica_id)
        # A 500 may be the request's own doing; were it held against the replica, one client could
        # empty the fleet.
        if failure is not Failure.SERVER_ERROR:
            self._books.replicas.report_failure(attempt.replica_id, failure.value)

    def on_first_byte(self, attempt: Attempt, seconds: float) -> None:
        if self._in_flight is not None:
            self._in_flight.first_token()
        self._routed.first_byte_s = seconds
        self._books.journal.changed(self._routed)
        self._books.replicas.report_served(attempt.replica_id)
        if self._knows(attempt.replica_id):
            self._books.metrics.first_byte.labels(self._decision.model, attempt.replica_id).observe(
                seconds
            )

    def on_chunk(self, data: bytes) -> None:
        self._usage.feed(data)
        events = self._usage.data_events
        if self._in_flight is not None and events > self._events:
            self._in_flight.generated(events - self._events)
            self._events = events

    def on_end(self, outcome: Outcome) -> None:
        if self._in_flight is not None:
            self._in_flight.ended()
        metrics, model = self._books.metrics, self._decision.model
        replica = self._label(outcome)
        metrics.requests.labels(
            model, replica, self._decision.policy, str(outcome.status or "none")
        ).inc()
        metrics.ends.labels(outcome.end.value).inc()
        metrics.total.labels(model).observe(outcome.seconds)
        if outcome.end is End.COMPLETED and outcome.status == 200 and self._knows(replica):
            self._compare(replica)
        self._settle(outcome)

    def _note_attempt(self, replica_id: str) -> None:
        """What the journal says of the replica that is tried now."""
        routed, hit = self._routed, self._decision.hit_of(replica_id)
        ranked = next(
            found
            for found in self._decision.ranking.ranked
            if found.candidate.replica_id == replica_id
        )
        routed.attempts += 1
        routed.replica, routed.dp_rank, routed.why = (
            replica_id,
            ranked.candidate.dp_rank,
            ranked.why,
        )
        routed.gpu_cached_tokens, routed.cached_tokens, routed.suspect = (
            hit.gpu_cached_tokens,
            hit.cached_tokens,
            hit.suspect,
        )
        self._books.journal.changed(routed)

    def _settle(self, outcome: Outcome) -> None:
        routed = self._routed
        routed.status, routed.end = outcome.status, outcome.end.value
        routed.first_byte_s, routed.seconds = outcome.first_byte_s, outcome.seconds
        self._books.journal.settled(routed)

    def _label(self, outcome: Outcome) -> str:
        """Who answered. The series of a replica that was removed meanwhile are gone, and must not
        come back."""
        if outcome.attempt is None:
            return "none"
        return outcome.attempt.replica_id if self._knows(outcome.attempt.replica_id) else "removed"

    def _knows(self, replica_id: str) -> bool:
        try:
            self._books.replicas.get(replica_id)
        except UnknownReplica:
            return False
        return True

    def _compare(self, replica: str) -> None:
        dispatched = self._dispatched
        if dispatched is None or not dispatched.is_comparable:
            return
        actual = self._cached_tokens(replica)
        if actual is not None:
            self._routed.actual_tokens = actual
            self._books.metrics.compare(
                self._decision.model, replica, self._decision.hit_of(replica).cached_tokens, actual
            )

    def _cached_tokens(self, replica: str) -> int | None:
        """What the engine says was cached. vLLM leaves a zero out, so from a replica that ever
        told, silence means none."""
        usage = self._usage.usage()
        if usage.cached_tokens is not None:
            self._books.tells_cached_tokens.add(replica)
        elif usage.prompt_tokens is not None and replica in self._books.tells_cached_tokens:
            return 0
        return usage.cached_tokens


def describe(
    path: str, request_id: bytes, decision: Decision, dispatched: Dispatched | None
) -> RoutedRequest:
    """A request as the journal knows it before it is sent."""
    prompts = () if dispatched is None else dispatched.tokenized
    return RoutedRequest(
        request_id=request_id.decode("latin-1"),
        path=path,
        model=decision.model,
        policy=decision.policy,
        stream=dispatched is not None and dispatched.spec.stream,
        prompt_tokens=decision.prompt_tokens,
        unknown=next((prompt.reason for prompt in prompts if prompt.reason is not None), None),
    )
