"""Whose word counts for where a request comes from: held to the standard library."""

from __future__ import annotations

import ipaddress
from importlib import import_module
from random import Random

from router.doors.http.networks import Networks

core = import_module("router._core")


def _address(random: Random) -> str:
    """Often near another one."""
    near = random.choice([0x0A000000, 0xC0A80000, 0x7F000000]) + random.randrange(1 << 10)
    six = (0x20010DB8 << 96) + (random.randrange(1 << 6) << random.choice([0, 60, 90]))
    return random.choice(
        [
            str(ipaddress.IPv4Address(near)),
            f"::ffff:{ipaddress.IPv4Address(near)}",
            str(ipaddress.IPv6Address(six)),
            f"fe80::{random.randrange(99)}%eth0",
            "",
            "no address",
        ]
    )


def _network(random: Random) -> str:
    while True:
        try:
            base = ipaddress.ip_address(_address(random).partition("%")[0])
        except ValueError:
            continue
        bits = random.randrange(base.max_prefixlen + 1)
        return str(ipaddress.ip_network(f"{base}/{bits}", strict=False))


def _is_in(address: str, networks: list[str]) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in ipaddress.ip_network(each) for each in networks)


def test_an_address_is_in_a_network_where_the_standard_library_says_so() -> None:
    """Else one of the two believes what a stranger says of itself."""
    random = Random(7)
    for _ in range(2000):
        texts = [_network(random) for _ in range(random.randrange(3))]
        networks = Networks(texts)
        for _ in range(10):
            address = _address(random)
            assert (address in networks) == _is_in(address, texts), (texts, address)


def test_what_is_no_network_is_refused() -> None:
    """Nothing is trusted by mistake."""
    ours = core.Networks()
    for address, bits in (("10.0.0.0", 33), ("10.0.0.0", -1), ("::", 129), ("x", 0)):
        assert not ours.add(address, bits)
