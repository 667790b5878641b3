"""How event streams are followed, and repaired."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from router.config.section import Section
from router.config.values import (
    PLAIN,
    Bytes,
    Count,
    CurvePublicKey,
    PlacedPath,
    Seconds,
    ZmqAddress,
)


class EventsConfig(Section, frozen=True):
    """Bounds on the event streams, each per source."""

    max_frame_bytes: Bytes = 64 * 1024 * 1024
    """Change it when a single batch is larger: a publisher that sends one is disconnected,
    `kvroute_source_connections_total` grows and the source becomes suspect."""
    max_queued_batches: Count = 10_000
    """Received and not yet applied. Anything beyond is dropped, counted, and recovered.

    Change it when `kvroute_events_overflow_total` grows: the number of batches that may wait while
    a replay runs, within 4 x `max_frame_bytes`."""
    max_replay_bytes: Bytes = 1024 * 1024 * 1024
    """Change it when a replay or snapshot of a large cache is cut short and
    `kvroute_events_unanswered_total` grows."""
    replay_timeout_s: Seconds = 5.0
    """Change it when the engine takes longer between two replies."""
    silent_after_s: Seconds = 60.0
    """Without any message for this long, the replay endpoint is asked whether the end of the stream
    was lost.

    Change it when a loss at the end of a quiet stream should be noticed sooner; checks begin after
    2 s of silence and back off up to this interval."""
    listen: ZmqAddress | None = None
    """The address for engines that connect to the router instead of the other way round, such as
    `tcp://*:5557`.

    Change it when engines are configured so, as llm-d's and KServe's are; the sources of such a
    replica have `endpoint: listen`. Any client that reaches the address can publish as any of them:
    let only engines through."""
    listen_ranks: Annotated[int, Field(ge=1, le=64), PLAIN] = 1
    """Addresses from there on, one for each data-parallel rank.

    Change it when engines have several ranks: each connects to the port of `listen` plus its
    rank."""
    curve_keys: PlacedPath | None = None
    """Change it when engines encrypt their streams
    ([security.md](security.md#encrypted-event-streams)): the file `NAME.key_secret` of `kvroute
    keys NAME`."""
    hash_key: PlacedPath | None = None
    """Change it when engines announce blocks without token ids
    ([security.md](security.md#event-streams-without-prompts)): the file `NAME.hash_key` of `kvroute
    keys --hash NAME`, the same as theirs."""
    curve_server_key: CurvePublicKey | None = None
    """Always with `curve_keys`: the public key of the engines, where `kv_events` names no other.
    Streams without a key are plain text."""
    self_repair: bool = True
    """Rebuild a source whose hits are predicted wrongly for long in quiet moments.

    Change it when sources whose hits are predicted wrongly for long should not be rebuilt; they are
    shown all the same."""
    self_repair_after_s: Seconds = 60.0
    """Change it when a wrong picture should be rebuilt sooner (lower), or short disturbances of the
    engines cause rebuilds (raise): the time from the first wrong prediction to the last."""
    self_repair_quiet_s: Seconds = 1.0
    """Change it when events take longer to arrive (raise), or requests follow each other so closely
    that none is judged (lower): only requests that come this long after the last one at a replica
    are judged."""
    rebuild_cool_down_s: Seconds = 600.0
    """The least time between two such rebuilds of one source.

    Change it when rebuilds cost too much (raise), or should be repeated sooner (lower)."""
