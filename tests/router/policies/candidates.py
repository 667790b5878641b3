"""Candidates of few values, so that many are equal."""

from __future__ import annotations

from hypothesis import strategies as st

from router.policies import Candidate, CandidateLoad

counts = st.sampled_from([0, 0, 0, 1, 3])
tokens = st.sampled_from([0, 0, 64, 1000, 4096, 100_000])
loads = st.builds(
    CandidateLoad,
    queued_prefill_tokens=tokens,
    prefilling_requests=counts,
    decoding_requests=counts,
    decode_context_tokens=tokens,
    foreign_requests=counts,
    waiting_requests=counts,
)


@st.composite
def candidate_lists(draw_from: st.DrawFn) -> list[Candidate]:
    found = []
    for number in range(draw_from(st.integers(1, 8))):
        gpu, lower = draw_from(tokens), draw_from(tokens)
        by_tier = draw_from(st.sampled_from([(), (("CPU", lower),), (("FS", lower),)]))
        found.append(
            Candidate(
                replica_id=f"r{9 - number}",
                gpu_cached_tokens=gpu,
                cached_tokens=gpu + lower,
                by_tier=by_tier if lower else (),
                recent_tokens=draw_from(tokens),
                progress_tokens=draw_from(st.sampled_from([0.0, 50.5, 900.0])),
                reuse_probability=draw_from(st.sampled_from([0.0, 0.25])),
                uncached_tokens_per_s=draw_from(st.sampled_from([0.0, 4000.0])),
                arrivals_per_s=draw_from(st.sampled_from([0.0, 2.0])),
                suspect=draw_from(st.booleans()),
                load=draw_from(loads),
                speed=draw_from(st.sampled_from([1.0, 1.0, 2.0, 0.3])),
                dp_rank=draw_from(st.sampled_from([None, 1])),
            )
        )
    return found
