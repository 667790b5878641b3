"""The ASGI application, and the process that runs it under uvicorn.

After a signal the process refuses new requests, finishes those under way, and exits with 0. Until
then it listens, so that probes and scrapes see what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import resource
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from router.board import Board
from router.config import RouterConfig
from router.doors.desk import Desk, DeskParts
from router.errors import ConfigError, ConfigProblem
from router.http.access import KEY_HEADERS, Guard
from router.http.access_log import logged
from router.http.api import create_api
from router.http.connection_guard import (
    OUT_OF_MEMORY,
    ClientLimits,
    GuardedHttpProtocol,
    Refusal,
    guarded_protocol,
)
from router.http.gateway import Gateway
from router.http.networks import Networks
from router.http.proxied_paths import ProxiedPaths, dialect_of
from router.http.questions import RouteQuestions
from router.http.responses import ApiParts
from router.index import PrefixIndex
from router.observability.request_log import LogPlace
from router.observability.request_observer import AskedInCore, Settled
from router.overload import EngineOrder
from router.placing import native_decisions
from router.plane import (
    DIALECTS,
    USUAL_HEADERS,
    BehindPlane,
    DataPlane,
    NoTls,
    PemFiles,
    PlaneListener,
    PlaneOptions,
    PlaneProxy,
    Secured,
    has_openssl,
    load_openssl,
)
from router.preparing import PREPARED, Preparation
from router.process import (
    BACKLOG,
    allow_open_files,
    announce,
    give_up_unwritten_log,
    in_url,
    listen,
    set_up_logging,
    share,
)
from router.reload import Reloader
from router.routing.admission import Admission, Elsewhere
from router.service import RouterService, SharedWith
from router.sharing import valkey_board
from router.tls import LISTENER, REPLICAS, Certificate, keep_fresh, listener_certificate
from router.upstream import PoolLimits
from router.workers.exposition import joined
from router.workers.fleet import FleetChanges
from router.workers.member import Member

if TYPE_CHECKING:
    from router.placing import NativeDecisions

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_MAX_ACCEPTS = 16
"""Connections accepted each time that the event loop looks at its sockets. libuv accepts one for
each socket that listens, so one would let the last of a thousand new clients wait for as many looks
at all streams: more than ten seconds."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that renders metrics or tokenises may keep the event loop, and with it every
stream, waiting each time. With Python's own 5 ms, the slowest 5 % of the tokens come 12 ms late;
with this, 1 ms."""


_COLLECTION_THRESHOLDS = (20_000, 20, 50)
"""Objects that survive until the young, the middle and the old are looked through. Requests leave
few cycles behind, and Python's own 700 would look through all that are under way hundreds of times
a second: 8 % of the router's time."""
_MAX_RESERVED_FILES = 64
_FIRST_WAIT_S = 5.0
"""How long a worker waits for the replicas before it listens, where no other one does: nobody
answers probes meanwhile."""
_METRICS, _EXEMPLARS = "metrics", "metrics with exemplars"
"""What workers ask each other for."""
_EXIT_REFUSED = 2
"""As for every refused command line."""


class RouterApp:
    """The ASGI application of one router: all but what `direct` serves.

    FastAPI and its middleware cost some 200 µs a request, and ASGI itself a task and its messages.
    """

    def __init__(self, service: RouterService, member: Member | None = None) -> None:
        self._logs_access = service.config.observability.access_log
        dispatcher, header = service.dispatcher, service.config.policy.session_header
        paths = ProxiedPaths(service.config.server.extra_paths)
        guard = _guard(service)
        self.gateway = Gateway(
            service.config.server,
            guard,
            header,
            service.admission,
            dispatcher,
            service.proxy,
            service.observers,
            paths,
            EngineOrder(service.config.overload),
            self._logs_access,
            service.entrance,
            None if service.tracing is None else service.tracing.tracer,
        )
        self.paths = paths
        self.desk = _desk(service)
        """Where gateways ask that send requests themselves."""
        parts = ApiParts(
            config=service.config,
            current_config=lambda: service.config,
            guard=guard,
            proxied_paths=paths,
            admission=service.admission,
            readiness=service.readiness,
            dispatcher=dispatcher,
            desk=self.desk,
            models=service.models,
            registry=service.registry,
            fleet_changes=_fleet_changes(service, member),
            feed=service.feed,
            tokenizer_check=service.tokenizer_check,
            repair=service.repair,
            approximate=service.approximate,
            sender=service.sender,
            request_log=service.request_log,
            metrics=service.metrics,
            history=service.history,
            shortages=service.shortages,
            render_metrics=_metrics_of_all(service, member),
            render_exemplars=_exemplars(service, member),
        )
        self._api = create_api(parts, _with_picker(_lifespan(service, member), self, service))
        self.direct = RouteQuestions(self.gateway, dispatcher, service.metrics, header)
        """Serves what does not go through ASGI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
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


def _guard(service: RouterService) -> Guard:
    return Guard(
        service.config.server,
        lambda endpoint: service.metrics.wrong_keys.labels(endpoint).inc(),
        service.key_limits.usages,
        service.peer_key,
    )


def _desk(service: RouterService) -> Desk:
    parts = DeskParts(
        service.dispatcher,
        service.observers,
        service.admission,
        service.entrance,
        EngineOrder(service.config.overload),
        service.reservations,
    )
    return Desk(parts)


def _lifespan(
    service: RouterService, member: Member | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Of the application; the server listens once it has begun.

    One of several workers knows its replicas by then: the kernel would deal it clients that the
    others can serve.
    """
    if member is None:
        return service.lifespan
    has_time, wait_s = member.others_listen, service.config.health.ready_wait_s
    if not has_time:
        wait_s = min(wait_s, _FIRST_WAIT_S)

    def may_wait() -> bool:
        return not has_time or member.others_listen

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.lifespan(app):
            await member.begin()
            await service.readiness.until_known(wait_s, may_wait)
            yield

    return lifespan


_Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def _with_picker(lifespan: _Lifespan, router: RouterApp, service: RouterService) -> _Lifespan:
    """A lifespan in which gateways can ask by external processing, if they are to."""
    config = service.config.doors.ext_proc
    if config.listen is None:
        return lifespan
    try:
        picking = import_module("router.picking")
    except ImportError as error:
        rule = "it needs the extra gateway: pip install '.[gateway]' in kvroute's checkout"
        problem = ConfigProblem("doors.ext_proc.listen", f"{config.listen}; {rule} ({error})")
        raise ConfigError([problem]) from error
    server = picking.make_picker(service, router.desk, router.gateway.guard, router.paths)

    @contextlib.asynccontextmanager
    async def with_picker(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app):
            await server.start()
            try:
                yield
            finally:
                await server.stop()

    return with_picker


def _fleet_changes(service: RouterService, member: Member | None) -> FleetChanges:
    allowed = Networks(service.config.server.replica_networks)
    return FleetChanges(service.registry, allowed.__contains__, member)


def _exemplars(
    service: RouterService, member: Member | None
) -> Callable[[], Awaitable[bytes]] | None:
    if service.tracing is None:
        return None
    return _metrics_of_all(service, member, has_exemplars=True)


def _metrics_of_all(
    service: RouterService, member: Member | None, has_exemplars: bool = False
) -> Callable[[], Awaitable[bytes]]:
    """Renders those of this process, and of all other workers if there are any."""
    render = functools.partial(service.render_metrics, has_exemplars)
    if member is None:
        return render
    what = _EXEMPLARS if has_exemplars else _METRICS

    async def own(_: bytes) -> bytes:
        return await render()

    async def of_all() -> bytes:
        here, others = await asyncio.gather(render(), member.ask(what))
        texts = {member.start.number: here, **others}
        return await asyncio.to_thread(joined, {who: text for who, text in texts.items() if text})

    member.answers[what] = own
    return of_all


class _GuardedServer(uvicorn.Server):
    """uvicorn that looks after its clients, listens until its last request has ended, and leaves
    signals alone: it would raise them again when it has stopped.

    Args:
        config: uvicorn's.
        admission: Refuses requests once the server is to stop, and knows those that run.
        grace_s: How long these may run on.
    """

    signals = 0
    """Signals to stop received so far."""
    on_listening: Callable[[], Awaitable[None]] | None = None
    """Awaited as soon as it listens."""

    def __init__(self, config: uvicorn.Config, admission: Admission, grace_s: float) -> None:
        super().__init__(config)
        self._admission = admission
        self._grace_s = grace_s
        self._stop_by = math.inf

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn: begin to listen."""
        await super().startup(sockets)
        if self.started and self.on_listening is not None:
            await self.on_listening()

    def stop(self) -> None:
        """The first call lets requests finish, the second cuts them, the third exits at once."""
        self.signals += 1
        if self.signals == 1:
            self._admission.shut_down()
            self._stop_by = asyncio.get_running_loop().time() + self._grace_s
        else:
            self.should_exit = True
            self.force_exit = self.signals > 2
        logger.info("shutting down: %d requests under way", self._admission.under_way)
        if self.signals == 2:
            self._abort()

    def _abort(self) -> None:
        for connection in self._connections():
            connection.abort()

    def _cut(self) -> None:
        for connection in self._connections():
            connection.cut()

    def _connections(self) -> tuple[GuardedHttpProtocol, ...]:
        return tuple(cast(set[GuardedHttpProtocol], self.server_state.connections))

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        now = asyncio.get_running_loop().time()
        if counter % 10 == 0:
            for connection in self._connections():
                connection.look_after(now)
        if self.signals and now >= self._stop_by:
            self._cut()
        if self.signals and (now >= self._stop_by or not self._admission.under_way):
            # uvicorn ends its connections now. What else still runs is a scrape or the like.
            self.config.timeout_graceful_shutdown = math.ceil(max(self._stop_by - now, 0))
            self.should_exit = True
        return await super().on_tick(counter)


class _ServerBehindPlane(_GuardedServer):
    """The same behind the data plane, which has the clients' connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: RouterService,
        plane: DataPlane,
        natives: NativeDecisions | None,
        preparation: Preparation,
    ) -> None:
        grace_s = service.config.server.timeouts.shutdown_grace_s
        super().__init__(config, service.admission, grace_s)
        self._plane = plane
        self._natives = natives
        self._preparation = preparation
        self._keeping: asyncio.Task[None] | None = None

    def start_deciding(self) -> None:
        """Let the core decide what it can, if it may."""
        natives, preparation = self._natives, self._preparation
        if natives is not None:
            self._admission.count_also(
                Elsewhere(
                    lambda: natives.under_way() + preparation.under_way,
                    self._plane.plane.held_bytes,
                )
            )
            self._keeping = asyncio.create_task(natives.run(self._plane))

    def stop_deciding(self) -> None:
        """From now on all requests are asked here: they are refused."""
        if self._natives is not None and self._keeping is not None:
            self._keeping.cancel()
            self._natives.stop(self._plane)

    def stop(self) -> None:
        """See `_GuardedServer.stop`."""
        self.stop_deciding()
        super().stop()

    def _connections(self) -> tuple[GuardedHttpProtocol, ...]:
        return ()

    def _abort(self) -> None:
        self._plane.cut_all()

    def _cut(self) -> None:
        self._plane.cut_all()


class ConfigSource(NamedTuple):
    """Where the configuration came from, to read it again."""

    read: Callable[[], RouterConfig]
    """Raises `ConfigError`."""
    watched: Path | None = None
    """Its file, if a change of it is to be noticed."""


async def serve(
    config: RouterConfig,
    new_index: Callable[..., PrefixIndex] = PrefixIndex,
    source: ConfigSource | None = None,
    member: Member | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal cuts what is still running. SIGHUP reads the
    configuration again. One of several workers heeds its supervisor instead.

    Args:
        config: The whole configuration.
        new_index: Makes the index of a model; see `ModelSet`.
        source: Reads it again; None: nothing does.
        member: Of several workers this one; None: there is one.
    Raises:
        ConfigError: The address cannot be bound, or a tokenizer, chat template or certificate
            cannot be used.
    """
    _check_plane(config)
    certificate = listener_certificate(config.server.tls)
    reserved_from = _reserved_files_from()
    service = RouterService(
        config,
        new_index=new_index,
        reserved_files_from=reserved_from,
        sharing=_shared_with(config, member),
        behind_plane=_is_native(config),
    )
    plane = "native" if isinstance(service.proxy, PlaneProxy) else "python"
    logger.info("data plane: %s", plane)
    app = RouterApp(service, member)
    if isinstance(service.proxy, PlaneProxy):
        secured = _PlaneCertificates(certificate, service.replica_certificate)
        await _serve_behind_plane(service, app, service.proxy, secured, reserved_from, source)
        return
    uvicorn_config = _uvicorn_config(service, app, reserved_from, certificate)
    grace_s = config.server.timeouts.shutdown_grace_s
    server = _GuardedServer(uvicorn_config, service.admission, grace_s)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(service.shortages.note_failure_of_loop)
    _heed(loop, server, member)
    with contextlib.closing(_listener(config, member)) as listener:
        exempt_from_collection()
        if member is None:
            _announce(listener, config)
        known = service.replica_certificate, service.peer_certificate, certificate
        async with _reloading(service, source, list(filter(None, known)), member):
            more = [listener.dup() for _ in range(_accepts() - 1)]
            await server.serve(sockets=[listener, *more])
    logger.info("stopped")


async def _serve_behind_plane(
    service: RouterService,
    app: RouterApp,
    proxy: PlaneProxy,
    certificates: _PlaneCertificates,
    reserved_from: int,
    source: ConfigSource | None,
) -> None:
    """The same with the compiled data plane before it: that has the clients, and uvicorn only what
    goes to no replica."""
    config, loop = service.config, asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-"))
        behind = stack.enter_context(contextlib.closing(_local_listener(f"{folder}/control")))
        listener = stack.enter_context(contextlib.closing(_listener(config, None)))
        guard = app.gateway.guard
        natives = native_decisions(service, proxy.addresses, guard.clients_see_hits)
        check_key = functools.partial(guard.check, "client", {})
        preparation = Preparation(
            service.dispatcher, natives, check_key if guard.needs_key("client") else None
        )
        control = f"{folder}/control"
        plane = _plane(service, app, proxy, preparation, reserved_from, control)
        server = _ServerBehindPlane(_plain_config(app), service, plane, natives, preparation)

        async def listens() -> None:
            listeners = [os.dup(listener.fileno()) for _ in range(config.server.threads)]
            plane.start(listeners, certificates.secured)
            preparation.plane = plane.plane
            guard.on_host = plane.plane.accept_host
            server.start_deciding()
            _announce(listener, config)

        server.on_listening = listens
        service.on_give_up(plane.give_up)
        service.count_connections_of(plane.counts)
        loop.set_exception_handler(service.shortages.note_failure_of_loop)
        _heed(loop, server, None)
        exempt_from_collection()
        known = list(filter(None, [service.peer_certificate, *certificates.known]))
        renewing = functools.partial(certificates.renew, plane)
        async with _reloading(service, source, known, None, renewing):
            try:
                await server.serve(sockets=[behind])
            finally:
                server.stop_deciding()
                await plane.close()
    logger.info("stopped")


class _PlaneCertificates:
    """What the compiled data plane shows and trusts, from the files of certificates.

    Args:
        listener: Towards clients; None: plain HTTP.
        replicas: Towards replicas; None: the system's authorities are trusted.
    Raises:
        ConfigError: A file cannot be used, or there is no library for TLS, which is asked for.
    """

    def __init__(self, listener: Certificate | None, replicas: Certificate | None) -> None:
        self._listener, self._replicas = listener, replicas
        self.known = list(filter(None, [listener, replicas]))
        """Those whose files are watched."""
        self.secured = Secured()
        try:
            load_openssl()
        except NoTls as error:
            for each in self.known:
                raise ConfigError([ConfigProblem(each.place, str(error))]) from None
            logger.info("replicas with https cannot be reached: %s", error)
        else:
            self._make()

    def renew(self, plane: DataPlane) -> None:
        """Use what the files hold now for new connections.

        Args:
            plane: Uses it.
        Raises:
            ConfigError: A file cannot be used; the old ones stay.
        """
        self._make()
        plane.plane.secure(*self.secured)

    def _make(self) -> None:
        listener = _pem_files(self._listener) if self._listener else None
        try:
            self.secured = Secured.made(listener, _pem_files(self._replicas))
        except NoTls as error:
            raise ConfigError(
                [ConfigProblem(LISTENER if listener else REPLICAS, str(error))]
            ) from None


def _pem_files(certificate: Certificate | None) -> PemFiles:
    if certificate is None:
        return PemFiles()
    return PemFiles(certificate.certificate, certificate.key, certificate.authorities)


def _announce(listener: socket.socket, config: RouterConfig) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.server.tls.certificate is None else "https"
    announce(f"kvroute listens on {scheme}://{in_url(host)}:{port}", config)


def _check_plane(config: RouterConfig) -> None:
    """Raises `ConfigError` where the compiled data plane cannot do what is configured."""
    if config.server.data_plane == "native" and config.server.workers > 1:
        why = "not with data_plane native: threads take their place"
        raise ConfigError([ConfigProblem("server.workers", why)])


def _is_native(config: RouterConfig) -> bool:
    """Whether the compiled data plane has the sockets; `_check_plane` has passed."""
    server = config.server
    if server.data_plane != "auto":
        return server.data_plane == "native"
    return server.workers == 1 and has_openssl()


def _local_listener(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _plane(
    service: RouterService,
    app: RouterApp,
    proxy: PlaneProxy,
    preparation: Preparation,
    reserved_from: int,
    path: str,
) -> DataPlane:
    return DataPlane(
        app.direct,
        proxy,
        _plane_options(service, app, reserved_from),
        path,
        PlaneListener(
            functools.partial(_count_refusal, service),
            functools.partial(_show, service),
            functools.partial(_settle, service, preparation),
            lambda number, failed: service.observers.handed_over(
                number, failed.replica, failed.failure, failed.retry_after_s
            ),
            lambda outcome: service.metrics.second_attempts.labels(outcome).inc(),
        ),
        preparation,
    )


def _plain_config(app: RouterApp) -> uvicorn.Config:
    return uvicorn.Config(
        BehindPlane(app),
        interface="asgi3",
        ws="none",
        proxy_headers=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
    )


def _plane_options(service: RouterService, app: RouterApp, reserved_from: int) -> PlaneOptions:
    server, limits = service.config.server, PoolLimits()
    needs_key = app.gateway.guard.needs_key("client")
    usual = USUAL_HEADERS | frozenset(KEY_HEADERS) if needs_key else USUAL_HEADERS
    return PlaneOptions(
        head_bytes=server.max_header_bytes,
        max_body_bytes=server.max_body_bytes,
        max_held_bytes=server.max_buffered_bytes,
        request_s=server.timeouts.client_body_s,
        client_stall_s=server.timeouts.client_stall_s,
        keep_alive_s=_KEEP_ALIVE_S,
        idle_s=limits.idle_s,
        max_idle=limits.max_idle_per_origin,
        max_connections=-(-server.max_upstream_connections // server.threads),
        reserved_from=min(reserved_from, 2**31 - 1),
        second_share=server.retries.late_share,
        dropped=app.gateway.dropped,
        decided_without=usual - {service.config.policy.session_header.encode()},
        decides_alone=not needs_key,
        prepares_by_fields=needs_key,
        checks_hosts=not needs_key,
        prepared=tuple(
            (endpoint.value.encode(), DIALECTS.index(dialect_of(endpoint.value)))
            for endpoint in PREPARED
        ),
    )


def _show(service: RouterService, number: int, *what: Any) -> None:
    """The core serves a request by itself, and has for a while."""
    service.observers.show(number, *_of_core(what), service.config.policy.name)


def _settle(service: RouterService, preparation: Preparation, number: int, *what: Any) -> None:
    """The core has served a request by itself."""
    settled, path = _of_core(what)
    preparation.settled(number, settled)
    service.observers.settle(number, settled, path, service.config.policy.name)


def _of_core(what: Sequence[Any]) -> tuple[Settled, str]:
    """A record of the core, and the path that was asked."""
    settled = Settled(*what)
    asked = AskedInCore(*settled.asked)
    return settled._replace(asked=asked), PREPARED[asked.path].value


def _count_refusal(service: RouterService, reason: str) -> None:
    """The core has ended a connection, or came to the last descriptors."""
    if reason == "reserve":
        service.shortages.note("open_files")
        return
    if reason == OUT_OF_MEMORY:
        service.shortages.note("memory")
    service.metrics.bad_requests.labels(reason).inc()


def _listener(config: RouterConfig, member: Member | None) -> socket.socket:
    """Raises `ConfigError` where the address cannot be had."""
    if member is None:
        return listen(config.server.host, config.server.port)
    # It listens only once its application has begun: see `_lifespan`.
    return share(config.server.host, member.start.port)


def _shared_with(config: RouterConfig, member: Member | None) -> SharedWith | None:
    """Raises `ConfigError` where the board's client or its certificates cannot be had."""
    own = secrets.token_bytes(32) if member is None else member.start.secret
    key = config.board.secret
    secret = own if key is None else key.get_secret_value().encode()
    boards: list[Board] = [] if member is None else [member.board]
    if config.board.url is not None:
        boards.append(valkey_board(config.board, secret, group=own))
    if member is None:
        return None if key is None else SharedWith(boards, key_secret=secret)
    start = member.start
    return SharedWith(
        boards,
        start.workers,
        start.number,
        start.restarts,
        secret,
        _own_url(config, start.port) if start.restarts else None,
        LogPlace(start.number, start.workers, start.started_at),
    )


def _own_url(config: RouterConfig, port: int) -> str:
    """Where this machine reaches the other workers."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
    scheme = "http" if config.server.tls.certificate is None else "https"
    return f"{scheme}://{in_url(host)}:{port}"


def _heed(loop: asyncio.AbstractEventLoop, server: _GuardedServer, member: Member | None) -> None:
    """Stop when a signal says so; one of several workers when its supervisor does: a signal to all
    processes of a service would otherwise count twice."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop if member is None else _ignore)
    if member is not None:
        loop.add_signal_handler(signal.SIGHUP, _ignore)
        member.on_stop = server.stop
        server.on_listening = member.listens


def _ignore() -> None:
    """A signal that is for the supervisor."""


@contextlib.asynccontextmanager
async def _reloading(
    service: RouterService,
    source: ConfigSource | None,
    certificates: Sequence[Certificate],
    member: Member | None,
    on_renewed: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Read the configuration again on SIGHUP, and files that are watched when they change."""
    jobs: list[Coroutine[Any, Any, None]] = []
    if any(each.certificate for each in certificates):
        jobs.append(keep_fresh(certificates, on_renewed))
    if source is not None:
        reloader = Reloader(source.read, service.reconfigure, service.metrics)
        if member is None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
        else:
            member.on_reload = reloader.ask
        jobs.append(reloader.run())
        if source.watched is not None:
            jobs.append(reloader.watch(source.watched))
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if member is not None:
            await member.close()


def run(
    config: RouterConfig,
    new_index: Callable[..., PrefixIndex] = PrefixIndex,
    source: ConfigSource | None = None,
    member: Member | None = None,
) -> int:
    """Run `serve` on uvloop; return the exit code of the process.

    Args:
        config: The whole configuration.
        new_index: Makes the index of a model; see `ModelSet`.
        source: Reads it again while the router runs; None: nothing does.
        member: Of several workers this one; None: there is one.
    Raises:
        ConfigError: As for `serve`, or too few files may be open.
    """
    set_up_logging(config, None if member is None else member.start.number)
    allow_open_files()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        if sys.version_info >= (3, 11):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve(config, new_index, source, member))
        else:
            uvloop.install()
            asyncio.run(serve(config, new_index, source, member))
    except ConfigError as error:
        if config.observability.log_format != "json":
            raise
        logger.critical("%s", error)
        return _EXIT_REFUSED
    finally:
        give_up_unwritten_log()
    return 0


def _uvicorn_config(
    service: RouterService, app: RouterApp, reserved_from: int, certificate: Certificate | None
) -> uvicorn.Config:
    config = service.config
    timeouts = config.server.timeouts
    limits = ClientLimits(
        config.server.max_header_bytes, timeouts.client_body_s, timeouts.client_stall_s
    )

    def count(refusal: Refusal) -> None:
        service.metrics.bad_requests.labels(refusal).inc()
        if refusal is OUT_OF_MEMORY:
            service.shortages.note("memory")

    protocol = guarded_protocol(limits, count, app.direct)
    protocol.reserved_from = reserved_from
    protocol.on_reserve = staticmethod(lambda: service.shortages.note("open_files"))
    made = uvicorn.Config(
        app,
        http=protocol,
        interface="asgi3",
        backlog=BACKLOG,
        ws="none",
        proxy_headers=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    made.load()
    made.ssl = None if certificate is None else certificate.context
    return made


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


def _accepts() -> int:
    """Each takes a file of its own, so fewer where few may be open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_ACCEPTS if limit < 0 else min(max(limit // 64, 1), _MAX_ACCEPTS)
