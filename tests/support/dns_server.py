"""A DNS server for one test: real messages over UDP, with records that change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """Answers from `records`: (name, type) -> ttl and values as in a zone file."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.rcode = dns.rcode.NOERROR
        """For every query; no answer at all where it is None."""
        self.refused_kinds: set[str] = set()
        """Types of records that get SERVFAIL, whatever `rcode` is."""
        self.is_silent = False
        self.queries: list[tuple[str, str]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), question.rdtype.name
        self.queries.append((name, kind))
        if self.is_silent:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        rcode = dns.rcode.SERVFAIL if kind in self.refused_kinds else self.rcode
        answer.set_rcode(rcode)
        found = self.records.get((name, kind))
        if found is not None and rcode == dns.rcode.NOERROR:
            ttl, values = found
            answer.answer.append(dns.rrset.from_text(question.name, ttl, "IN", kind, *values))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(rcode or dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def dns_server(
    listen: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[tuple[DnsServer, str]]:
    """A server, and its address as `nameserver` has it."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(DnsServer, local_addr=(listen, port))
    try:
        host, port = transport.get_extra_info("sockname")
        yield server, f"{host}#{port}"
    finally:
        transport.close()
