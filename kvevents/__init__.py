"""KV cache events: the content of an inference engine's cache, published and followed over ZMQ.

An engine announces every block that it stores or removes; a consumer, such as the router, follows
the stream, detects every loss and repairs it. Everything an engine's author needs is imported from
here:

    import kvevents as kv

    layout = kv.KVCacheLayout.build([kv.KVCacheGroup(kv.GroupKind.FULL, block_size=16)])
    config = kv.PublisherConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:6557")
    with kv.create_publisher(config, layout) as publisher:
        publisher.publish([kv.BlockStored([0xB10C], None, list(range(16)), kv.GPU, group_idx=0)])

`Subscriber` is the other end. `examples/engine.py` is a whole engine, `docs/engines.md` has the
rules of publishing.

The files; each imports only what is listed above it:

    errors.py             exception tree
    field_docs.py         fields of statistics: their texts, and which metrics they are
    plugins.py            implementations by name: built-in, registered, from entry points
    events.py             BlockStored, BlockRemoved, the clears, CacheLayout, batches, the
                          aggregator of workers
    layout.py             the groups of a cache, checked
    hit_rule.py           how much of a prompt such a cache can serve
    hashing.py            token ids -> chain of block hashes, as vLLM computes them
    codec.py              bytes <-> batches: native, vLLM of every age, SGLang, Mooncake
    stream_state.py       the states of a followed stream, what can happen to it, what is done
    stream_repair.py      how it is repaired, as a table over these
    sequence.py           what a sequence number means
    messages.py           the frames of a ZMQ message
    trtllm.py             TensorRT-LLM's events, which are asked for, as batches
    sealing.py            block hashes under a key, for streams without token ids
    curve.py              keys at both ends of a stream, which encrypt it
    endpoints.py          addresses: checked, moved along by rank, opened
    publisher_config.py   the configuration of a publisher
    cache_state.py        the present state of a cache, written as a snapshot
    replay_server.py      the replay endpoint: requests, and how much of each reply is sent
    stream.py             one numbered stream on its own thread, its last batches kept
    cache_source.py       the payloads of a cache's stream: steps, heartbeats, snapshots
    publisher.py          the engine's side: publishers, and which one a configuration asks for
    pacing.py             how subscribers share the event loop; backoff, silences
    threads.py            threads that begin before they are needed
    tasks.py              tasks whose end does not go unnoticed
    lookups.py            names of hosts to addresses
    sockets.py            one connection of one ZMQ socket on an event loop
    delivery.py           every batch once and in order; what a consumer must do
    listener.py           one address that many publishers connect to
    live.py               the live side of a connection, also during a recovery
    replay.py             asking a replay endpoint, every answer bounded
    recovery.py           carries the table out: asks, hands on, waits
    subscriber.py         the router's side: follows one publisher
"""

from kvevents.codec import decode, encode
from kvevents.curve import CurveClient, CurveKeys, CurveServer
from kvevents.delivery import Consumer, Effect
from kvevents.errors import (
    EndpointError,
    HashAlgorithmError,
    HashKeyError,
    KVEventsError,
    LayoutError,
    MalformedBatch,
    MalformedReply,
    NoAnswer,
    NoConnection,
    PlugInError,
    PublisherClosed,
)
from kvevents.events import (
    CPU,
    GPU,
    STORAGE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheLayout,
    Event,
    EventBatch,
    GroupIdx,
    GroupSpec,
    KVEventAggregator,
    TierBlocksCleared,
)
from kvevents.hashing import HashChain, hash_algorithms
from kvevents.hit_rule import longest_extended_hit, longest_hit
from kvevents.layout import GroupKind, KVCacheGroup, KVCacheLayout
from kvevents.live import BacklogLimits
from kvevents.messages import Batch
from kvevents.pacing import Pacer
from kvevents.publisher import (
    EventPublisher,
    NullEventPublisher,
    PresentState,
    PublisherStatistics,
    ZmqEventPublisher,
    create_publisher,
    register_publisher,
)
from kvevents.publisher_config import PublisherConfig, ReplyLimits
from kvevents.replay import ReplayLimits
from kvevents.sealing import HashKey, read_hash_key
from kvevents.sockets import SocketLimits
from kvevents.stream_state import SourceState
from kvevents.subscriber import Subscriber, SubscriberOptions, SubscriberStatistics

__all__ = [
    "CPU",
    "GPU",
    "STORAGE",
    "AllBlocksCleared",
    "BacklogLimits",
    "Batch",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "CacheLayout",
    "Consumer",
    "CurveClient",
    "CurveKeys",
    "CurveServer",
    "Effect",
    "EndpointError",
    "Event",
    "EventBatch",
    "EventPublisher",
    "GroupIdx",
    "GroupKind",
    "GroupSpec",
    "HashAlgorithmError",
    "HashChain",
    "HashKey",
    "HashKeyError",
    "KVCacheGroup",
    "KVCacheLayout",
    "KVEventAggregator",
    "KVEventsError",
    "LayoutError",
    "MalformedBatch",
    "MalformedReply",
    "NoAnswer",
    "NoConnection",
    "NullEventPublisher",
    "Pacer",
    "PlugInError",
    "PresentState",
    "PublisherClosed",
    "PublisherConfig",
    "PublisherStatistics",
    "ReplayLimits",
    "ReplyLimits",
    "SocketLimits",
    "SourceState",
    "Subscriber",
    "SubscriberOptions",
    "SubscriberStatistics",
    "TierBlocksCleared",
    "ZmqEventPublisher",
    "create_publisher",
    "decode",
    "encode",
    "hash_algorithms",
    "longest_extended_hit",
    "longest_hit",
    "read_hash_key",
    "register_publisher",
]
