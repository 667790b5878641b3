"""Lists of networks: of replicas that may be added, and of proxies in front."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from importlib import import_module
from typing import TypeAlias

from async_timeout import timeout

from kvevents.endpoints import ZmqEndpoint
from kvevents.listener import LISTENED_TO
from kvevents.lookups import addresses
from router.config.origin import Origin
from router.config.replica import ReplicaConfig
from router.config.values import POLLED, reachable
from router.errors import BadRequest

Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"

_RESOLVE_S = 3.0


class Networks:
    """A list of networks.

    Args:
        texts: As in the configuration, `10.0.0.0/8`; checked there.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._networks: tuple[Network, ...] = tuple(map(ipaddress.ip_network, texts))
        self._core = import_module("router._core").Networks()
        for prefix in self.prefixes():
            self._core.add(*prefix)

    def prefixes(self) -> tuple[tuple[str, int], ...]:
        """The networks, each as an address and the length of its prefix in bits."""
        return tuple((str(each.network_address), each.prefixlen) for each in self._networks)

    def __contains__(self, address: str) -> bool:
        found: bool = self._core.contains(address)  # an IPv4 address in IPv6 counts as IPv4
        return found

    async def check_replica(self, config: ReplicaConfig) -> None:
        """Check that a replica and its event streams lie in them, so that no operator's key can be
        used to reach what only this machine reaches. Raises BadRequest like `check`."""
        host = config.origin.host
        await self.check("$.url", host)
        for index, source in enumerate(config.kv_events or ()):
            for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
                if (given := getattr(source, name)) in (None, LISTENED_TO):
                    continue
                place = f"$.kv_events[{index}].{name}"
                await self.check(place, _host_of(name, reachable(given, host)))

    async def check(self, place: str, host: str) -> None:
        """Check that every address of a host lies in them.

        Raises:
            BadRequest: One does not, or the name has none.
        """
        try:
            async with timeout(_RESOLVE_S):
                found = await addresses(host)
        except (OSError, asyncio.TimeoutError):
            raise BadRequest(place, repr(host), "must resolve to an address") from None
        for address in found:
            if address not in self:
                rule = "must lie in server.replica_networks"
                raise BadRequest(place, f"the address {address}", rule)


def _host_of(name: str, address: str) -> str:
    if address.startswith(POLLED):
        return Origin.parse(address, name).host
    endpoint = ZmqEndpoint.parse(name, address)
    return endpoint.address.strip("[]") if endpoint.scheme == "tcp" else "127.0.0.1"
