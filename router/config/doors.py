"""Configures the endpoints and limits of gateways that send requests themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.config.section import Section
from router.config.tls import ListenerTlsConfig
from router.config.values import PLAIN, Count, Seconds

ListenAddress = Annotated[
    str, Field(pattern=r"^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$", max_length=256), PLAIN
]


class ExtProcConfig(Section, frozen=True):
    """The endpoint picker for Envoy and the gateways made of it: external processing over gRPC.
    Needs the extra `gateway`."""

    listen: ListenAddress | None = None
    """Change it when a gateway asks here where requests go: `0.0.0.0:9002`. Any client that reaches
    that port can ask; with client keys, for what its key is for."""
    fallbacks: Annotated[int, Field(ge=0, le=8), PLAIN] = 0
    """Change it when the gateway takes a list of endpoints and tries the next by itself; a cluster
    of Envoy's kind `ORIGINAL_DST` takes one only."""
    read_response: bool = True
    """Change it when responses should not pass through here: then what engines report is not
    compared with predictions, and a request counts as over when its response begins. Needs
    `allow_mode_override` in the gateway."""
    rank_ports: bool = False
    """Change it when each data-parallel rank has a port of its own, the replica's plus the rank, as
    llm-d's sidecar has: the picker then writes `x-data-parallel-host-port`."""
    max_streams: Count = 16_384
    """Change it when gateways have more requests under way at a time; more are refused with 503."""
    tls: ListenerTlsConfig = ListenerTlsConfig()
    """Like [`server.tls`](#servertls); a new certificate needs a restart."""


class DoorsConfig(Section, frozen=True):
    """For gateways that ask where a request should go and send it themselves."""

    max_reservations: Count = 16_384
    """Change it when gateways have more requests under way at a time; more are refused with 503."""
    reservation_idle_s: Seconds = 600.0
    """A reservation without a report of its gateway for so long ends by itself.

    Change it when responses take longer and the gateway reports no progress, or when gateways are
    often killed and what they had booked should be free sooner."""
    ext_proc: ExtProcConfig = ExtProcConfig()
