"""Replicas from DNS: addresses of a name, or its SRV records (RFC 2782)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
from pydantic import ValidationError

from kvevents.pacing import Backoff
from router.config.discovery import DnsDiscovery, name_server
from router.config.document import Stamp, stamp_of
from router.config.origin import in_url
from router.config.replica import ReplicaConfig
from router.fleet.discovery.provider import FIRST_RETRY_S, ProviderListener

_LOOKUP_S = 5.0
_ADDRESSES = dns.rdatatype.A, dns.rdatatype.AAAA
_ABSENT = (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer)
MAX_RECORDS = 4096
SYSTEM = Path("/etc/resolv.conf")
"""Names the system's servers. That of a machine changes with its network."""


class DnsProvider:
    """Resolves a name again whenever its records expire.

    An answer without any record is taken for a failure: a resolver that has just lost its data
    answers the same, and health checks show which replicas are really gone. Of addresses, the kind
    that cannot be asked for keeps those that were found last: servers that know no IPv6 respond
    with SERVFAIL to AAAA, always.
    """

    def __init__(self, config: DnsDiscovery) -> None:
        self.name = config.title
        self._config = config
        self._resolver: dns.asyncresolver.Resolver | None = None
        self._stamp: Stamp | None = None
        """That of the system's file when the resolver was made."""
        self._answers: dict[dns.rdatatype.RdataType, Any] = {}
        """The last answer for each kind of address that has one."""
        self._failed: dict[dns.rdatatype.RdataType, Exception] = {}
        """Why a kind of address could not be asked for, at the last time."""

    async def follow(self, listener: ProviderListener) -> None:
        config = self._config
        retry = Backoff(FIRST_RETRY_S, config.max_interval_s)
        while True:
            try:
                places, ttl_s = await self._resolve()
                replicas = [self._replica(host, port) for host, port in places]
            except (dns.exception.DNSException, OSError, ValidationError) as error:
                listener.on_failure(_reason(error))
                wait_s = retry.next_delay()
            else:
                failed = [f"{kind.name}: {_reason(why)}" for kind, why in self._failed.items()]
                listener.on_replicas(replicas, failed)
                retry.reset()
                wait_s = min(max(ttl_s, config.min_interval_s), config.max_interval_s)
            await asyncio.sleep(wait_s)

    async def _resolve(self) -> tuple[list[tuple[str, int]], float]:
        """Host and port of each replica, in a stable order, and when to ask again, in seconds."""
        if self._config.record == "srv":
            return await self._services()
        self._failed.clear()
        asked = {kind: await self._ask_again(kind) for kind in _ADDRESSES}
        answers = {kind: answer for kind, answer in asked.items() if answer is not None}
        if not answers.keys() - self._failed.keys():
            for error in self._failed.values():
                raise error
            raise dns.resolver.NXDOMAIN
        self._answers = answers
        hosts = sorted({record.address for answer in answers.values() for record in answer})
        port = self._config.port or 0
        return [(host, port) for host in hosts[:MAX_RECORDS]], _ttl_s(list(answers.values()))

    async def _ask_again(self, kind: dns.rdatatype.RdataType) -> Any:
        """The answer for one kind of address; the last one where there is none now."""
        try:
            return await self._ask(kind)
        except dns.resolver.NoResolverConfiguration:
            raise
        except (dns.exception.DNSException, OSError) as error:
            self._failed[kind] = error
            return self._answers.get(kind)

    async def _services(self) -> tuple[list[tuple[str, int]], float]:
        answer = await self._ask(dns.rdatatype.SRV)
        if answer is None:
            raise dns.resolver.NXDOMAIN
        first = min(record.priority for record in answer)
        places = {
            (record.target.to_text(omit_final_dot=True), record.port)
            for record in answer
            if record.priority == first
        }
        return sorted(places)[:MAX_RECORDS], _ttl_s([answer])

    async def _ask(self, kind: dns.rdatatype.RdataType) -> Any:
        """The answer; None where the name has no such record."""
        resolver = self._current_resolver()
        try:
            return await resolver.resolve(self._config.name, kind, search=True)
        except _ABSENT:
            return None

    def _current_resolver(self) -> dns.asyncresolver.Resolver:
        """The resolver; a new one if the system's file has changed, the last if it is gone."""
        stamp = None if self._config.nameserver else stamp_of(SYSTEM)
        if self._resolver is None or stamp not in (None, self._stamp):
            self._resolver = _resolver(self._config.nameserver)
            self._stamp = stamp
        return self._resolver

    def _replica(self, host: str, port: int) -> ReplicaConfig:
        options = self._config.replica
        given = {name: getattr(options, name) for name in options.model_fields_set}
        url = f"{self._config.scheme}://{in_url(host)}:{port}"
        return ReplicaConfig(url=url, **given)


def _resolver(nameserver: str | None) -> dns.asyncresolver.Resolver:
    """Make the resolver.

    Raises:
        NoResolverConfiguration: The system names no name server.
    """
    found = dns.asyncresolver.Resolver(os.fspath(SYSTEM), configure=nameserver is None)
    found.lifetime = _LOOKUP_S
    if nameserver is not None:
        address, found.port = name_server(nameserver)
        found.nameservers = [address]
    return found


def _ttl_s(answers: Sequence[Any]) -> float:
    return float(min(answer.rrset.ttl for answer in answers))


def _reason(error: Exception) -> str:
    if isinstance(error, dns.resolver.NXDOMAIN):
        return "the name has no such records"
    return f"{type(error).__name__}: {error}"[:300]
