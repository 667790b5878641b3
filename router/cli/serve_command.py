"""`kvroute serve`: run the router."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from router.config import RouterConfig, read_replica
from router.serve import run as run_server


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "serve",
        description="Runs until SIGTERM, then finishes the requests under way.",
    )
    parser.add_argument(
        "--config", type=Path, help="YAML file (default: no replicas, default settings)"
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
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal, or only check the configuration."""
    config = RouterConfig.load(arguments.config, os.environ) if arguments.config else RouterConfig()
    config = _overridden(config, arguments)
    if arguments.check:
        print(
            f"the configuration is sound: {len(config.models)} models, "
            f"{len(config.replicas)} replicas"
        )
        return 0
    return run_server(config)


def _overridden(config: RouterConfig, arguments: argparse.Namespace) -> RouterConfig:
    host = config.server.host if arguments.host is None else arguments.host
    port = config.server.port if arguments.port is None else arguments.port
    added = tuple(read_replica({"url": url}) for url in arguments.replica)
    server = config.server.model_copy(update={"host": host, "port": port})
    return config.model_copy(update={"server": server, "replicas": config.replicas + added})
