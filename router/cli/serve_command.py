"""`kvroute serve`: run the router."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from router.config.certificates import PICKER, listener_certificate
from router.config.document import read_text, stamp_of
from router.config.schema import RouterConfig
from router.serve.server import ConfigSource, RouterApp
from router.serve.server import run as run_server
from router.serve.service import RouterService


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "serve",
        description="Runs until SIGTERM, then finishes the requests under way.",
    )
    parser.add_argument(
        "--config", type=Path, help="YAML file (default: no replicas, default settings)"
    )
    parser.add_argument(
        "--watch-config",
        action="store_true",
        help="read the file again when it changes, as on SIGHUP",
    )
    parser.add_argument("--host", help="overrides server.host")
    parser.add_argument("--port", type=int, help="overrides server.port; 0 lets the system choose")
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="a replica to start with, whose models and event streams are discovered; repeatable",
    )
    parser.add_argument(
        "--ext-proc",
        metavar="HOST:PORT",
        help="overrides doors.ext_proc.listen: where Envoy and the gateways made of it ask",
    )
    parser.add_argument("--threads", type=int, help="overrides server.threads: of the data plane")
    _add_overrides(parser)
    parser.set_defaults(run=run)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    """Options that override the file."""
    parser.add_argument(
        "--insecure",
        action="store_const",
        const=True,
        help="listen beyond this machine without a client key; as server.insecure",
    )
    parser.add_argument(
        "--allow-capture",
        action="store_const",
        const=True,
        help="let operators record prompts, as token ids: kvroute capture --url",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="overrides observability.log_level",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="overrides observability.log_format"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check the configuration, load tokenizers, templates and the policy, and exit",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or only check the configuration."""
    overrides, path = _overrides(arguments), arguments.config

    def read() -> RouterConfig:
        text = read_text(path) if path else ""
        return RouterConfig.from_yaml(text, os.environ, path and path.parent, overrides)

    watched = path if arguments.watch_config else None
    stamp = None if watched is None else stamp_of(watched)
    config = read()
    if arguments.check:
        _load(config)
        print(
            f"the configuration is sound: {len(config.models)} models, "
            f"{len(config.replicas)} replicas"
        )
        return 0
    return run_server(config, source=ConfigSource(read, watched, stamp))


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, as a document."""

    def given(**options: object) -> dict[str, object]:
        return {name: value for name, value in options.items() if value is not None}

    return {
        "server": given(
            host=arguments.host,
            port=arguments.port,
            threads=arguments.threads,
            insecure=arguments.insecure,
        ),
        "replicas": [{"url": url} for url in arguments.replica],
        "doors": {"ext_proc": given(listen=arguments.ext_proc)},
        "observability": given(
            log_level=arguments.log_level,
            log_format=arguments.log_format,
            allow_capture=arguments.allow_capture,
        ),
    }


def _load(config: RouterConfig) -> None:
    """Make what a start would make of it, which reads every file, and let it go again.

    Raises:
        ConfigError: A file cannot be used, or what an extra installs is missing.
        PolicyError: The policy cannot be made.
    """
    listener_certificate(config.server.tls)
    if config.doors.ext_proc.listen is not None:
        listener_certificate(config.doors.ext_proc.tls, PICKER)
    service = RouterService(config)
    RouterApp(service)
    service.models.close()
