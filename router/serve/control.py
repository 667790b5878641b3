"""uvicorn behind the data plane, from its first request to its last; and the certificates that the
plane shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

import uvicorn
from async_timeout import timeout
from starlette.types import ASGIApp, Receive, Scope, Send

from kvevents.tasks import begin_lasting
from router.config.certificates import LISTENER, REPLICAS, Certificate
from router.errors import ConfigError, ConfigProblem
from router.plane.data_plane import CLIENT_HEADER, DataPlane
from router.plane.secured import NoTls, PemFiles, Secured, load_openssl
from router.routing.admission import Admission, Elsewhere

logger = logging.getLogger(__name__)


class Decides(Protocol):
    """Decides requests in the core; `NativeDecisions` has what each call does."""

    def under_way(self) -> int: ...
    def allow(self, most: int) -> None: ...
    def run(self, plane: DataPlane) -> Coroutine[Any, Any, None]: ...
    def stop(self, plane: DataPlane) -> None: ...


class ControlServer(uvicorn.Server):
    """uvicorn behind the data plane, which has the clients' connections. It listens until the last
    request has ended, and leaves signals alone: it would raise them again when it has stopped.

    Args:
        admission: Counts the requests that are finished first.
        grace_s: The time that they have.
        natives: What decides in the core; None: nothing does.
        prepared: Counts the requests whose prompts are read for it.
        streams: Counts the streams of gateways, through which their clients' responses pass.
    """

    signals = 0
    """Signals to stop received so far."""
    on_listening: Callable[[], Awaitable[None]] | None = None
    """Awaited as soon as it listens."""

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        grace_s: float,
        plane: DataPlane,
        natives: Decides | None,
        prepared: Callable[[], int],
        streams: Callable[[], int],
    ) -> None:
        super().__init__(_uvicorn_config(app))
        self._admission = admission
        self._grace_s = grace_s
        self._has_signal = asyncio.Event()
        self._stop_by = math.inf
        self._is_idle = False
        self.plane = plane
        self._natives = natives
        self._prepared = prepared
        self._streams = streams
        self._keeping: asyncio.Task[None] | None = None

    def start_deciding(self) -> None:
        """Let the core decide what it can, if it may."""
        natives, prepared = self._natives, self._prepared
        if natives is not None:
            self._admission.count_also(
                Elsewhere(
                    lambda: natives.under_way() + prepared(),
                    self.plane.plane.held_bytes,
                    natives.allow,
                    self.plane.plane.hold_elsewhere,
                )
            )
            consequence = "the core decides by an old picture"
            self._keeping = begin_lasting(natives.run(self.plane), "core's picture", consequence)

    def stop_deciding(self) -> None:
        """From now on all requests are asked here: they are refused."""
        if self._natives is not None and self._keeping is not None:
            self._keeping.cancel()
            self._natives.stop(self.plane)

    def stop(self) -> None:
        """The first call lets requests finish, the second cuts them, the third exits at once."""
        self.stop_deciding()
        self.signals += 1
        self._has_signal.set()
        if self.signals == 1:
            self._admission.shut_down()
            self._stop_by = asyncio.get_running_loop().time() + self._grace_s
            self._is_idle = False
        else:
            self.should_exit = True
            self.force_exit = self.signals > 2
        logger.info("shutting down: %d requests under way", self._admission.under_way)
        if self.signals == 2:
            self.plane.cut_all()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, as uvicorn does."""
        await super().startup(sockets)
        if self.started and self.on_listening is not None:
            await self.on_listening()

    async def main_loop(self) -> None:
        """Do what uvicorn does once a second, and ten times once it stops."""
        while not await self.on_tick(0):
            if self.signals:
                await asyncio.sleep(0.1)
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                async with timeout(1.0):
                    await self._has_signal.wait()

    def _serves_nobody(self) -> bool:
        return not (self._admission.under_way or self.plane.unread() or self._streams())

    async def on_tick(self, counter: int) -> bool:
        """Return whether it is over."""
        now = asyncio.get_running_loop().time()
        if self.signals and now >= self._stop_by:
            self.plane.cut_all()
        # Twice in a row: one that the core hands over counts nowhere until its event is handled.
        was_idle, self._is_idle = self._is_idle, self._serves_nobody()
        if self.signals and (now >= self._stop_by or (was_idle and self._is_idle)):
            # uvicorn ends its connections now. What else still runs is a scrape or the like.
            self.config.timeout_graceful_shutdown = math.ceil(max(self._stop_by - now, 0))
            self.should_exit = True
        return await super().on_tick(counter)


class BehindPlane:
    """The application, with the real client's address in its scope."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            client = next((value for name, value in headers if name == CLIENT_HEADER), b"")
            host, _, port = client.decode("latin-1").rpartition(" ")
            scope["client"] = host, int(port or 0)
            scope["headers"] = [pair for pair in headers if pair[0] != CLIENT_HEADER]
        await self._application(scope, receive, send)


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        BehindPlane(app),
        interface="asgi3",
        ws="none",
        proxy_headers=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
    )


class PlaneCertificates:
    """Holds what the compiled data plane shows and trusts, from the files of certificates.

    Args:
        listener: Towards clients; None: plain HTTP.
        replicas: Towards replicas; None: the system's authorities are trusted.
    Raises:
        ConfigError: A file cannot be used, or there is no library for TLS, which is asked for.
    """

    def __init__(self, listener: Certificate | None, replicas: Certificate | None) -> None:
        self._listener, self._replicas = listener, replicas
        self.known = list(filter(None, [listener, replicas]))
        """The certificates whose files are watched."""
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
            place = LISTENER if error.is_towards_clients else REPLICAS
            raise ConfigError([ConfigProblem(place, str(error))]) from None


def _pem_files(certificate: Certificate | None) -> PemFiles:
    if certificate is None:
        return PemFiles()
    names = certificate.certificate, certificate.key, certificate.authorities
    return PemFiles(*(name or "" for name in names))
