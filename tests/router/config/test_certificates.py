"""What is trusted and shown, from files that are renewed."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from async_timeout import timeout

from router.config.certificates import (
    Certificate,
    keep_fresh,
    listener_certificate,
    replica_certificate,
)
from router.config.server import ListenerTlsConfig, ReplicaTlsConfig
from router.errors import ConfigError
from tests.support.waiting import DEADLINE_S

NAME = "127.0.0.1"


class Files:
    """A certificate with its key, and the authorities, as files."""

    def __init__(self, directory: Path) -> None:
        self.certificate = directory / "certificate.pem"
        self.key = directory / "key.pem"
        self.authorities = directory / "ca.pem"
        self.issue(trustme.CA())
        trustme.CA().cert_pem.write_to_path(self.authorities)

    def issue(self, authority: trustme.CA) -> None:
        issued = authority.issue_cert(NAME)
        issued.cert_chain_pems[0].write_to_path(self.certificate)
        issued.private_key_pem.write_to_path(self.key)

    def towards_clients(self) -> Certificate:
        pair = {"certificate": str(self.certificate), "key": str(self.key)}
        made = listener_certificate(
            ListenerTlsConfig.model_validate({**pair, "client_ca": str(self.authorities)})
        )
        assert made is not None
        return made

    def towards_replicas(self) -> Certificate:
        made = replica_certificate(ReplicaTlsConfig(ca=str(self.authorities)))
        assert made is not None
        return made


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("made_by", [Files.towards_clients, Files.towards_replicas])
def test_other_authorities_are_noticed_and_take_the_place_of_the_old_ones(
    files: Files, made_by: Callable[[Files], Certificate]
) -> None:
    """One that is to be trusted no more must not stay beside the new one."""
    certificate = made_by(files)
    before, stamp = certificate.context.get_ca_certs(), certificate.stamp()
    trustme.CA().cert_pem.write_to_path(files.authorities)
    assert certificate.stamp() != stamp
    certificate.load()
    (now,) = certificate.context.get_ca_certs()
    assert now not in before


def test_files_that_cannot_be_used_leave_everything_as_it_was(files: Files) -> None:
    """Neither the new authorities nor the new certificate are in use before both can be."""
    certificate = files.towards_clients()
    before = certificate.context, certificate.context.get_ca_certs()
    trustme.CA().cert_pem.write_to_path(files.authorities)
    trustme.CA().issue_cert(NAME).private_key_pem.write_to_path(files.key)
    with pytest.raises(ConfigError, match=r"server\.tls\.certificate"):
        certificate.load()
    files.issue(trustme.CA())
    files.authorities.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"server\.tls\.client_ca"):
        certificate.load()
    assert (certificate.context, certificate.context.get_ca_certs()) == before
    assert certificate.context.verify_mode is ssl.CERT_REQUIRED


async def test_files_renewed_while_the_router_starts_are_noticed(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers take a while to load after the certificate, and it is renewed once in months."""
    certificate = files.towards_clients()
    before = certificate.context
    files.issue(trustme.CA())
    os.utime(files.certificate, (1, 1))  # written within one tick of the file system's clock
    monkeypatch.setattr("router.config.certificates._WATCH_S", 0.01)
    renewed = asyncio.Event()
    keeping = asyncio.create_task(keep_fresh([certificate], renewed.set))
    try:
        async with timeout(DEADLINE_S):
            await renewed.wait()
    finally:
        keeping.cancel()
    assert certificate.context is not before
