"""`kvroute keys`: make the keys of one end of encrypted event streams."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from kvevents.curve import make_keys, read_keys
from kvevents.sealing import make_hash_key, read_hash_key

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def add_to(commands: Any) -> None:
    """Add the command to a parser's others."""
    parser = commands.add_parser(
        "keys",
        description="Makes a pair of CURVE keys for encrypted event streams: one for the engines "
        "that publish, one for each router. docs/security.md has their places.",
    )
    parser.add_argument("name", type=_name, help="of the files")
    parser.add_argument("--directory", type=Path, default=Path(), help="default: the present one")
    parser.add_argument(
        "--hash",
        action="store_true",
        help="make a hash key instead, for streams without token ids: engines and routers share it",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make the keys, and print what the other end needs."""
    if arguments.hash:
        path = make_hash_key(arguments.directory, arguments.name)
        print(f"hash key    {path}  id {read_hash_key(path).key_id}")
        print("            the same file for engines and routers, where only they read it")
        return 0
    public, secret = make_keys(arguments.directory, arguments.name)
    print(f"public key  {public}  {read_keys(secret).public.decode()}")
    print(f"secret key  {secret}  keep it where only its owner reads it")
    return 0


def _name(text: str) -> str:
    if not _NAME.match(text):
        raise argparse.ArgumentTypeError("expected 1 to 64 of A-Z a-z 0-9 _ . -")
    return text
