"""The process that is a router: the data plane, and behind it the application under uvicorn.

After a signal the process refuses new requests, finishes those under way, and exits with 0. Until
then it listens, so that probes and scrapes see what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from kvevents.errors import EndpointError
from kvevents.tasks import begin_lasting
from kvevents.threads import begun_pool
from router.config.certificates import (
    Certificate,
    keep_fresh,
    listener_certificate,
)
from router.config.document import Stamp
from router.config.extras import import_extra
from router.config.origin import KEPT_S, in_url
from router.config.schema import RouterConfig
from router.doors.adopted import Adopted
from router.doors.desk import Desk
from router.doors.http.access import Guard
from router.doors.http.access_log import logged
from router.doors.http.api import (
    ApiParts,
    add_description,
    add_operation,
    add_probes,
    add_route,
    new_api,
)
from router.doors.http.dialects import DialectEndpoints, add_dialects
from router.doors.http.error_handlers import add_error_handlers
from router.doors.http.gateway import Gateway
from router.doors.http.live_page import add_page
from router.doors.http.models import add_models
from router.doors.http.openapi import Access
from router.doors.http.questions import RouteQuestions
from router.doors.http.selection import SELECT_PATH, add_selection, take_report
from router.doors.proxied_paths import PREPARED, ProxiedPaths, dialect_of
from router.doors.reservations import RESERVE_PATH, ReservationStatistics
from router.doors.terms_reader import TermsReader
from router.errors import ConfigError, Overloaded
from router.fleet.entrance import EngineOrder
from router.index.index import PrefixIndex
from router.index.mirror_types import WORTH_PUBLISHING
from router.plane.data_plane import DataPlane, PlaneListener, PlaneOptions
from router.plane.relays import DIALECTS
from router.policies.policies import LEAST_DELAY
from router.prompt.endpoints import Endpoint
from router.serve.control import ControlServer, PlaneCertificates
from router.serve.process import (
    BACKLOG,
    allow_open_files,
    announce,
    give_up_unwritten_log,
    listen,
    run_on_event_loop,
    set_up_logging,
)
from router.serve.reload import Reloader
from router.serve.seams.fleet import NativeDecisions, opened_with, prepared_with
from router.serve.seams.prepare import Preparation
from router.serve.seams.records import Settling
from router.serve.service import RouterService
from router.telemetry.collector import collect, fields_as_metrics

logger = logging.getLogger(__name__)

_Lifespan: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]

_KEEP_ALIVE_S = 75
_MAX_IDLE = 256
"""Idle connections kept for each replica."""
_OUT_OF_MEMORY = "overloaded"
"""The core's word for a connection that it had no memory for."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that renders metrics or tokenises may keep the event loop, and with it every
stream, waiting each time. With Python's own 5 ms, the slowest 5 % of the tokens come 12 ms late;
with this, 1 ms."""
_COLLECTION_THRESHOLDS = (20_000, 20, 50)
"""Objects that survive until the young, the middle and the old are looked through. Requests leave
few cycles behind, and Python's own 700 would look through all that are under way hundreds of times
a second: 8 % of the router's time."""
_MAX_RESERVED_FILES = 64
_THREADS = 8
"""For files, large bodies and pages: what would hold the event loop up."""
_EXIT_REFUSED = 2
"""The same as for every refused command line."""


# --- the application ------------------------------------------------------------------------------


class RouterApp:
    """The ASGI application of one router: all but what `direct` serves.

    FastAPI and its middleware cost some 200 µs a request, and ASGI itself a task and its messages.
    """

    def __init__(self, service: RouterService) -> None:
        config, admission, entrance = service.config, service.admission, service.entrance
        self._logs_access = config.observability.access_log
        self.paths = ProxiedPaths(config.server.extra_paths)
        guard = Guard(
            config.server,
            lambda endpoint: service.metrics.wrong_keys.labels(endpoint).inc(),
            service.key_limits.usages,
            service.peer_key,
        )
        session_header = config.policy.session_header.encode()
        terms = TermsReader(session_header, entrance, config.server.trust_client_rank)
        self.gateway = Gateway(service, guard, self.paths, terms)
        self.desk = Desk(
            service.dispatcher,
            service.observers,
            admission,
            entrance,
            EngineOrder(config.overload),
            service.reservations,
            terms,
        )
        """Answers gateways that send requests themselves."""
        traces = service.tracing is not None
        render = functools.partial(render_metrics, service)
        parts = ApiParts(service, guard, service.reservations, render, traces)
        self._api = _api(parts, self.paths, self.desk)
        self.streams: Callable[[], int] = lambda: 0
        """Counts the streams of gateways that ask by external processing."""
        self.lifespan = _with_picker(service.lifespan, self, service)
        """Starts and stops all behind it. It runs around uvicorn, which would log a trace of its
        errors, and end the process itself."""
        self.direct = RouteQuestions(self.gateway)
        """Serves the requests that do not go through ASGI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._api(scope, receive, send)
        elif self._logs_access:
            await logged(self._respond, scope, receive, send)
        else:
            await self._respond(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body out
        await self._api(scope, receive, send)


def _api(parts: ApiParts, paths: ProxiedPaths, desk: Desk) -> FastAPI:
    """Make the application for all paths that are not proxied."""
    app, router, guard = new_api(), parts.router, parts.guard
    client, operator = Access("client", guard), Access("operator", guard)
    add_error_handlers(app, paths, router.observers)
    add_probes(app, parts, operator)
    sees_hits = client if guard.clients_see_hits else Access("operator", guard, False)
    add_route(app, parts, desk.terms, sees_hits)
    add_selection(app, desk, router.config, sees_hits)
    add_dialects(app, DialectEndpoints(router), sees_hits, operator)
    add_models(app, router.models, router.registry, client)
    add_operation(app, parts, operator)
    add_page(app)
    add_description(app, client)
    return app


async def render_metrics(service: RouterService, has_exemplars: bool = False) -> bytes:
    """Return all metrics in Prometheus' text format, or with exemplars in OpenMetrics'."""
    reservations = [((), service.reservations.statistics())]
    made = itertools.chain(
        collect(service), fields_as_metrics(ReservationStatistics, (), reservations)
    )
    return await service.metrics.render(made, has_exemplars)


def _with_picker(lifespan: _Lifespan, router: RouterApp, service: RouterService) -> _Lifespan:
    """A lifespan in which gateways can ask by external processing, if they are to."""
    config = service.config.doors.ext_proc
    if config.listen is None:
        return lifespan
    picking = import_extra(
        "router.doors.external_processing", "gateway", "doors.ext_proc.listen", config.listen
    )
    server = picking.make_picker(
        service.config,
        router.desk,
        router.gateway.guard,
        router.paths,
        service.readiness.why_not_ready,
    )
    router.streams = lambda: server.streams

    @contextlib.asynccontextmanager
    async def with_picker() -> AsyncIterator[None]:
        async with lifespan():
            await server.start()
            try:
                yield
            finally:
                await server.stop()

    return with_picker


# --- the process ----------------------------------------------------------------------------------


class ConfigSource(NamedTuple):
    """Where the configuration came from, to read it again."""

    read: Callable[[], RouterConfig]
    """Raises `ConfigError`."""
    watched: Path | None = None
    """Its file, if a change of it is to be noticed."""
    stamp: Stamp | None = None
    """The file's stamp before it was read."""


async def serve(
    config: RouterConfig,
    new_index: Callable[..., PrefixIndex] = PrefixIndex,
    source: ConfigSource | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal cuts what is still running. SIGHUP reads the
    configuration again.

    Args:
        source: Reads it again; None: nothing does.
    Raises:
        ConfigError: An address cannot be bound, or a tokenizer, chat template or certificate
            cannot be used.
        EndpointError: That of `events.listen` cannot be bound.
    """
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    if source is not None:  # before tokenizers are loaded: without a handler, SIGHUP ends a process
        loop.add_signal_handler(signal.SIGHUP, asked.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # `router.cli.main` blocks it
    certificate = listener_certificate(config.server.tls)
    service = RouterService(config, new_index=new_index)
    app = RouterApp(service)
    certificates = PlaneCertificates(certificate, service.replica_certificate)
    await _begin_threads(loop)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-"))
        control = f"{folder}/control"
        behind = stack.enter_context(contextlib.closing(_local_listener(control)))
        address = config.server.host, config.server.port
        listener = stack.enter_context(contextlib.closing(listen(*address)))
        server = _control_server(service, app, control, listener, certificates)
        loop.set_exception_handler(service.shortages.note_failure_of_loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        exempt_from_collection()
        known = list(filter(None, [service.peer_certificate, *certificates.known]))
        renewing = functools.partial(certificates.renew, server.plane)
        async with _reloading(service, source, asked, known, renewing):
            try:
                async with app.lifespan():
                    await server.serve(sockets=[behind])
            finally:
                server.stop_deciding()
                await server.plane.close()
    logger.info("stopped")


async def _begin_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Begin all threads now: later there may be no memory for one, which the loop then waits for in
    vain (see `kvevents.threads`); for its own, which look names up, libuv ends the process."""
    loop.set_default_executor(begun_pool(_THREADS, "work"))
    with contextlib.suppress(OSError):
        await loop.getaddrinfo("localhost", None)


def _control_server(
    service: RouterService,
    app: RouterApp,
    path: str,
    listener: socket.socket,
    certificates: PlaneCertificates,
) -> ControlServer:
    """The application behind the data plane, which takes clients once that listens at *path*."""
    config, guard = service.config, app.gateway.guard
    planner, reserved = service.planner, service.reservations.core
    natives = None
    if not planner.asks_a_plug_in:  # what a plug-in would say, the core does not know
        natives = NativeDecisions(
            service, service.dispatcher, planner, reserved, guard.clients_see_hits
        )
    check_key = functools.partial(guard.check, "client", {})
    check_asker = functools.partial(guard.check, guard.asks_for_hits, {})
    preparation = Preparation(
        service.dispatcher,
        natives,
        check_key if guard.needs_key("client") else None,
        check_asker if guard.needs_key(guard.asks_for_hits) else None,
        app.gateway.terms,
        app.gateway.router.tracer,
        app.gateway.engine_order,
    )
    plane = _plane(service, app, preparation, path)
    server = ControlServer(
        app,
        service.admission,
        config.server.timeouts.shutdown_grace_s,
        plane,
        natives,
        lambda: preparation.under_way,
        app.streams,
    )

    async def listens() -> None:
        listeners = [os.dup(listener.fileno()) for _ in range(config.server.threads)]
        plane.start(listeners, certificates.secured)
        preparation.plane = plane.plane
        guard.on_host = accept_host = plane.plane.accept_host
        # Else Python would look at all requests that come before it has looked at the first.
        for host in guard.known_hosts(listener.getsockname()[1]):
            accept_host(host)
        server.start_deciding()
        _announce(listener, config)

    server.on_listening = listens
    service.follower.give_up = plane.give_up
    service.count_connections = plane.counts
    return server


def _announce(listener: socket.socket, config: RouterConfig) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.server.tls.certificate is None else "https"
    announce(f"kvroute listens on {scheme}://{in_url(host)}:{port}", config)


def _local_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _plane(
    service: RouterService,
    app: RouterApp,
    preparation: Preparation,
    path: str,
) -> DataPlane:
    settling = Settling(
        service.observers,
        preparation,
        service.config.policy.name,
        service.config.observability.access_log,
        service.entrance,
        service.proxy.count_requests,
    )
    reserved = Adopted(service, service.reservations)
    if settling.sum_bounds is not None:
        service.reservations.follow_core(reserved.adopt)
    return DataPlane(
        app.direct,
        service.proxy,
        _plane_options(service, app),
        path,
        PlaneListener(
            on_refusal=functools.partial(count_refusal, service),
            on_running=settling.running,
            on_settled=settling.settled,
            on_summed=settling.summed,
            sum_bounds=settling.sum_bounds,
            on_left=settling.left,
            on_handed_over=settling.handed_over,
            on_looked_up=lambda model, routing_s, tokenization_s: service.metrics.decided(
                model, tokenization_s, routing_s
            ),
            on_reserved=reserved.made,
            on_reported=functools.partial(take_report, service.reservations),
            on_second_attempt=lambda outcome: service.metrics.second_attempts.labels(outcome).inc(),
            on_long_prompt=service.publish_soon,
        ),
        preparation,
        functools.partial(_hold, service),
    )


def _plane_options(service: RouterService, app: RouterApp) -> PlaneOptions:
    server = service.config.server
    needs_key = app.gateway.guard.needs_key("client")
    tells_gateways = _tells_gateways(service, app)
    return PlaneOptions(
        head_bytes=server.max_header_bytes,
        max_body_bytes=server.max_body_bytes,
        max_held_bytes=server.max_buffered_bytes,
        request_s=server.timeouts.client_body_s,
        client_stall_s=server.timeouts.client_stall_s,
        keep_alive_s=_KEEP_ALIVE_S,
        idle_s=KEPT_S,
        max_idle=_MAX_IDLE,
        max_connections=-(-server.max_upstream_connections // server.threads),
        reserved_from=min(_reserved_files_from(), 2**31 - 1),
        passes_429=not service.registry.backs_off,
        second_share=server.retries.late_share,
        dropped=app.gateway.forwarding.dropped,
        prepares_all=needs_key or service.tracing is not None,
        route_path=Endpoint.ROUTE.value.encode() if tells_gateways else b"",
        select_path=SELECT_PATH.encode() if tells_gateways else b"",
        reserve_path=RESERVE_PATH.encode() if tells_gateways else b"",
        asks_with_key=app.gateway.guard.needs_key(app.gateway.guard.asks_for_hits),
        prepared_with=prepared_with(service.config),
        opened_with=opened_with(service.config),
        long_prompt_tokens=0 if service.exchange is None else WORTH_PUBLISHING,
        checks_hosts=not needs_key,
        trusted_proxies=app.gateway.forwarding.trusted_proxies.prefixes(),
        prepared=tuple(
            (endpoint.value.encode(), DIALECTS.index(dialect_of(endpoint.value)))
            for endpoint in PREPARED
        ),
    )


def _tells_gateways(service: RouterService, app: RouterApp) -> bool:
    """Return whether the core may answer gateways that ask where a request should go. Who may ask
    without a key from this machine only is known to Python."""
    config, guard = service.config, app.gateway.guard
    says_all = config.policy.name == LEAST_DELAY and not config.observability.access_log
    return says_all and (guard.clients_see_hits or guard.needs_key("operator"))


def _hold(service: RouterService, size: int) -> None:
    """Count the bytes of a body for the application; counts a request for which there is no room,
    too."""
    try:
        service.admission.hold(size)
    except Overloaded as error:
        service.observers.refused(error)
        raise


def count_refusal(service: RouterService, reason: str) -> None:
    """The core has ended a connection, or came to the last descriptors."""
    if reason == "reserve":
        service.shortages.note("open_files")
        return
    if reason == _OUT_OF_MEMORY:
        service.shortages.note("memory")
        service.request_log.count_failure()
    service.metrics.bad_requests.labels(reason).inc()


@contextlib.asynccontextmanager
async def _reloading(
    service: RouterService,
    source: ConfigSource | None,
    asked: asyncio.Event,
    certificates: Sequence[Certificate],
    on_renewed: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Read the configuration again when *asked*, and files that are watched when they change."""
    jobs: list[Coroutine[Any, Any, None]] = []
    if certificates:
        jobs.append(keep_fresh(certificates, on_renewed))
    if source is not None:
        reloader = Reloader(source.read, service.reconfigure, service.metrics, asked)
        jobs.append(reloader.run())
        if source.watched is not None:
            jobs.append(reloader.watch(source.watched, source.stamp))
    consequence = "files that change are not read again"
    tasks = [begin_lasting(job, "reloading", consequence) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(
    config: RouterConfig,
    new_index: Callable[..., PrefixIndex] = PrefixIndex,
    source: ConfigSource | None = None,
) -> int:
    """Run `serve` on uvloop; return the exit code of the process.

    Args:
        source: Reads it again while the router runs; None: nothing does.
    Raises:
        ConfigError: As for `serve`, or too few files may be open.
        EndpointError: As for `serve`.
    """
    set_up_logging(config)
    allow_open_files()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        run_on_event_loop(serve(config, new_index, source))
    except (ConfigError, EndpointError) as error:
        if config.observability.log_format != "json":
            raise
        logger.critical("%s", error)
        return _EXIT_REFUSED
    finally:
        give_up_unwritten_log()
    return 0


def exempt_from_collection() -> None:
    """Keep the garbage collector from looking through what is there now and will stay: modules,
    tokenizers, configuration. Each time it would stop every stream, for 50 ms and more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)


def _reserved_files_from() -> int:
    """The last file descriptors are for probes, scrapes and operators."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit - min(limit // 8, _MAX_RESERVED_FILES) if limit > 0 else sys.maxsize
