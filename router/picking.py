"""The endpoint picker, wired. Imported only where it is to listen: it needs the extra `gateway`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.doors import NOBODY, Caller, Desk
from router.doors.ext_proc import ExtProcServer, Limits
from router.doors.picker import PickerParts
from router.errors import RequestError
from router.http.access import KEY_HEADERS, Guard
from router.http.proxied_paths import ProxiedPaths, dialect_of
from router.http.selection import caller_of
from router.routing.decision import RANK_HEADER
from router.service import RouterService

_FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_OBJECTIVE = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_DOOR = "ext_proc"


def make_picker(
    service: RouterService, desk: Desk, guard: Guard, paths: ProxiedPaths
) -> ExtProcServer:
    """What listens for gateways.

    Args:
        service: The router.
        desk: Answers.
        guard: Checks the keys of clients, where they need any.
        paths: What their paths stand for.
    """
    config, server = service.config, service.config.server
    needs_key = guard.needs_key("client")
    parts = PickerParts(
        desk=desk,
        admission=service.admission,
        find_path=paths.find,
        dialect_of=dialect_of,
        caller=_callers(guard) if needs_key else lambda _headers, _path: NOBODY,
        aliases=_aliases(service),
        dropped=(*(KEY_HEADERS if needs_key else ()), RANK_HEADER),
        session_header=config.policy.session_header.encode(),
        max_body_bytes=server.max_body_bytes,
        fallbacks=config.doors.ext_proc.fallbacks,
        reads_response=config.doors.ext_proc.read_response,
    )
    limits = Limits(server.timeouts.client_body_s, server.max_body_bytes)
    return ExtProcServer(config.doors.ext_proc, parts, limits, service.readiness.why_not_ready)


def _aliases(service: RouterService) -> Mapping[bytes, tuple[bytes, ...]]:
    """What the gateways of the field call the headers that are configured here."""
    overload = service.config.overload
    found = {overload.tenant_header: _FAIRNESS, overload.priority_header: _OBJECTIVE}
    return {name.encode(): others for name, others in found.items() if name is not None}


def _callers(guard: Guard) -> Callable[[Mapping[bytes, bytes], str], Caller]:
    """Who a gateway's clients are, by their keys. A wrong one is counted and logged; its refusal is
    not held back, since all come from the gateway's address."""

    def caller(headers: Mapping[bytes, bytes], path: str) -> Caller:
        try:
            return caller_of(guard.check("client", {}, headers), path)
        except RequestError as error:
            if guard.delay_s(error, _DOOR, "the gateway"):
                guard.delay_over()
            raise

    return caller
