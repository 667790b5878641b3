"""A tier from a third-party package, installed as pip would leave it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MODULE = '''
import dataclasses
import json
import os

from offload.cpu.manager import CPUOffloadingManager
from offload.reuse_filter import ReuseFilter
from offload.tiers import Count, TierOptions, read_options


class PeerOptions(TierOptions, frozen=True, kw_only=True):
    num_blocks: Count
    peer: str
    fails: str = ""


class PeerManager(CPUOffloadingManager):
    """Takes only blocks of requests that ask for it, and writes down what it was asked."""

    medium = "PEER"

    def on_new_request(self, context):
        if path := os.environ.get("PEER_LOG"):
            with open(path, "a") as log:
                print(json.dumps(context.kv_transfer_params), file=log)

    def prepare_store(self, keys, context):
        wanted = (context.kv_transfer_params or {}).get("share", False)
        return super().prepare_store(keys if wanted else [], context)

    def take_events(self):
        return [dataclasses.replace(event, medium="PEER") for event in super().take_events()]


class PeerSpec:
    def __init__(self, options, host):
        self.options = read_options(PeerOptions, "peer", options)
        self.host = host
        self.closed = 0
        made.append(self)

    @property
    def blocks_per_offloaded_block(self):
        return self.options.sizes(self.host)

    def create_manager(self):
        if self.options.fails == "manager":
            raise RuntimeError("no peer")
        return self.options.filtered(
            PeerManager(self.options.num_blocks, enable_events=self.options.needs_events(self.host))
        )

    def create_worker(self):
        def over_pages(pages):
            from offload.cpu.worker import CPUTransferWorker
            return CPUTransferWorker(
                pages, self.options.num_blocks, self.blocks_per_offloaded_block
            )

        return self.host.backend.worker(over_pages)

    def close(self):
        self.closed += 1


made = []


class Half:
    def __init__(self, options, host):
        pass

    def create_manager(self):
        pass
'''

ENTRY_POINTS = """
[kvroute.offload_tiers]
peer = kvroute_peer_tier:PeerSpec
half = kvroute_peer_tier:Half
cpu = kvroute_peer_tier:Half
"""


def install(site: Path) -> None:
    """Write the distribution into *site*, a folder that is or will be on `sys.path`."""
    (site / "kvroute_peer_tier.py").write_text(MODULE)
    info = site / "kvroute_peer_tier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvroute-peer-tier\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


@contextmanager
def installed(site: Path) -> Iterator[None]:
    """Make the distribution in *site* importable like any other while this lasts."""
    install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    sys.modules.pop("kvroute_peer_tier", None)
