"""The sweep: what it runs, what it keeps, and what it makes of the figures."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

from benchmarks import routing_quality
from benchmarks.simulation import tables
from benchmarks.simulation.comparison import pooled, quantile, ratio
from benchmarks.simulation.misjudging import Misjudgment, misjudged_names
from benchmarks.simulation.results import Results, latest
from benchmarks.simulation.routing import LEAST_DELAY
from benchmarks.simulation.situations import (
    SITUATIONS,
    TRACE_PARTS,
    TRACE_STRIDE,
    TRAFFIC,
    WARM_UP,
)
from router.policies import (
    Candidate,
    PolicySettings,
    RouteRequest,
    Weights,
    make_policy,
)

MOONCAKE_REQUESTS = 11_203
"""In the conversation trace, with prompts that are not left out for their length."""
ARGUMENTS = [
    "--situation",
    "documents",
    "--policy",
    "least_delay",
    "prefix",
    "--requests",
    "30",
    "--seeds",
    "10-11",
]


def swept(path: Path, *arguments: str) -> list[str]:
    """The lines of the results after a sweep."""
    routing_quality.main([*ARGUMENTS, "--results", str(path), *arguments])
    return path.read_text().splitlines()


def test_a_sweep_continues_where_it_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full one takes hours."""
    path = tmp_path / "results.jsonl"
    lines = swept(path)
    found = [(line["situation"], line["policy"], line["seed"]) for line in map(json.loads, lines)]
    assert found == [
        ("documents", policy, seed) for seed in (10, 11) for policy in ("least_delay", "prefix")
    ]
    assert "| prefix | 1 | 2 | " in capsys.readouterr().out
    assert swept(path) == lines
    path.write_text("\n".join([*lines[:2], lines[2], lines[3][:50]]) + "\n")
    again = swept(path)
    first, second = json.loads(lines[3]), json.loads(again[-1])
    for measured in ("at", "processor_s"):
        first.pop(measured)
        second.pop(measured)
    assert len(again) == 5
    assert first == second


def test_shards_share_the_runs(tmp_path: Path) -> None:
    """Each run belongs to one process."""
    assert len(swept(tmp_path / "results.jsonl", "--shard", "0/2", "--policy", "session")) == 1
    assert len(swept(tmp_path / "results.jsonl", "--shard", "1/2", "--policy", "session")) == 2


def test_every_figure_of_a_line_is_there(tmp_path: Path) -> None:
    """The tables and the document are made only from these lines."""
    line = json.loads(swept(tmp_path / "results.jsonl", "--policy", "prefix", "--seeds", "3")[0])
    assert 0 < line["hit_rate"] < 1
    assert 0 < line["ttft_p50_ms"] <= line["ttft_p90_ms"] <= line["ttft_p99_ms"]
    assert 0 <= line["avoidable_mean_ms"] < line["ttft_mean_ms"]
    assert line["later_ttft_mean_ms"] == 0  # all its requests are the first of their sessions
    assert line["promised_too_much"] + line["promised_too_little"] == pytest.approx(
        line["mispredicted"], abs=0.001
    )
    assert line["processor_s"] > 0


def test_every_situation_can_be_built(tmp_path: Path) -> None:
    """One that cannot would be noticed after hours."""
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 900, "output_length": 9, "hash_ids": [0, 1]}
    rows = [{"timestamp": 100 * place, **row} for place in range(5000)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    for situation in SITUATIONS.values():
        workload = situation.make_workload(0, trace)
        needed = workload.size.longest_tokens
        assert situation.cache_tokens >= 0.9 * needed, situation
        assert situation.setting("prefix", 0).replica.num_blocks > 0


# --- comparisons ----------------------------------------------------------------------------------


def test_a_ratio_has_the_interval_of_students_t() -> None:
    """By hand: logarithms 0, 0.2 and 0.4 have the mean 0.2, the deviation 0.2, and t = 4.303."""
    found = ratio([(1.0, 1.0), (math.exp(0.2), 1.0), (math.exp(0.4), 1.0)])
    half = 4.303 * 0.2 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.2))
    assert (found.low, found.high) == pytest.approx((math.exp(0.2 - half), math.exp(0.2 + half)))
    assert found.pairs == 3
    assert not found.is_worse
    assert ratio([(2.0, 1.0), (2.1, 1.0), (2.2, 1.0)]).is_worse
    assert ratio([(1.0, 2.0), (1.0, 2.1), (1.0, 2.2)]).is_better


def test_quantiles_are_those_of_the_tables() -> None:
    """A wrong one makes chance look like a difference."""
    assert [quantile(degrees) for degrees in (1, 9, 30, 500)] == [12.706, 2.262, 2.042, 1.960]
    assert quantile(0) == math.inf


def test_one_pair_says_nothing_about_chance() -> None:
    """A single run must never be a result."""
    found = ratio([(3.0, 1.0)])
    assert (found.low, found.high) == (0.0, math.inf)
    with pytest.raises(ValueError, match="0 pairs"):
        ratio([])
    with pytest.raises(ValueError, match="positive"):
        ratio([(0.0, 1.0)])


def test_pooled_situations_count_the_same_whatever_their_seeds() -> None:
    """Ten seeds of one situation must not outvote two of another."""
    many = [(2.0, 1.0)] * 9 + [(2.0001, 1.0)]
    few = [(1.0, 2.0), (1.0, 2.0001)]
    found = pooled([many, few])
    assert found.mean == pytest.approx(1.0, abs=0.001)
    assert found.pairs == 12
    # Two situations whose differences have a variance of 0.01 / 4 and 0.04 / 4.
    first = [(math.exp(value), 1.0) for value in (-0.1, 0.1, -0.1, 0.1)]
    second = [(math.exp(value), 1.0) for value in (-0.2, 0.2, -0.2, 0.2)]
    spread = math.sqrt((0.01 + 0.04) * 4 / 3 / 4) / 2
    assert math.log(pooled([first, second]).high) == pytest.approx(2.447 * spread)


def test_a_situation_with_one_seed_does_not_pass_for_certain() -> None:
    """It is taken to vary as much as the others do."""
    several = [(math.exp(value), 1.0) for value in (-0.1, 0.1, -0.1, 0.1)]
    spread = math.sqrt(0.04 / 3 / 4 + 0.04 / 3) / 2
    found = pooled([several, [(1.0, 1.0)]])
    assert math.log(found.high) == pytest.approx(3.182 * spread)
    assert pooled([[(2.0, 1.0)], [(3.0, 1.0)]]).low == 0


def test_tables_pair_runs_by_seed() -> None:
    """The workload of one seed differs from that of another by more than policies do."""
    lines = [
        {"situation": "s", "policy": policy, "seed": seed, "ttft_mean_ms": mean}
        for policy, means in (("a", {1: 1.0, 2: 10.0}), ("b", {2: 20.0, 1: 2.0, 3: 5.0}))
        for seed, mean in means.items()
    ]
    assert tables.pairs(lines, "a", "b", "ttft_mean_ms") == [(1.0, 2.0), (10.0, 20.0)]
    found = tables.compared(lines, "a", "b", "ttft_mean_ms")
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert tables.compared(lines, "a", "c", "ttft_mean_ms") is None


@pytest.mark.parametrize(
    ("means", "best"),
    [
        # The seed 2 is slow for everyone, and only one of them was run with it.
        ({"group_blind": {1: 5.0}, "group_blind_any_copy": {1: 3.0, 2: 50.0}}, "any_copy"),
        ({"group_blind": {1: 1.0}, "group_blind_any_copy": {2: 2.0, 3: 2.0}}, "any_copy"),
        ({}, None),
    ],
    ids=["common seeds", "no common seed", "none"],
)
def test_the_best_blind_index_is_that_of_the_seeds_that_all_have(
    means: dict[str, dict[int, float]], best: str | None
) -> None:
    """Means over unlike seeds say which seeds are slow."""
    lines = [
        {"situation": "s", "policy": policy, "seed": seed, "ttft_mean_ms": mean}
        for policy, by_seed in means.items()
        for seed, mean in by_seed.items()
    ]
    found = tables.best(lines, tables.BLIND)
    assert found == (best and f"group_blind_{best}")


def test_a_gain_is_told_by_traffic_against_what_did_best_there() -> None:
    """A reader asks what there is to gain for traffic like theirs; a weak opponent is no answer."""
    means = {
        "chats": {"least_delay": 8.0, "prefix": 10.0, "dynamo": 16.0, "sglang": 80.0},
        "chats, slow": {"least_delay": 8.0, "prefix": 10.0, "dynamo": 80.0, "sglang": 16.0},
        "documents": {"least_delay": 9.0, "prefix": 9.0},
        "chats, gemma": {"least_delay": 90.0, "prefix": 9.0},
    }
    lines = [
        {"situation": situation, "policy": policy, "seed": seed, "ttft_mean_ms": mean}
        for situation, by_policy in means.items()
        for policy, mean in by_policy.items()
        for seed in (1, 2)
    ]
    chats, documents, *_, every = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in tables.gain_table(lines).splitlines()[2:]
    ]
    assert chats == ["Chats", "0.80 (0.80-0.80)", "", "0.50 (0.50-0.50)", "", ""]
    assert documents[:4] == ["Documents", "1.00 (1.00-1.00)", "", ""]
    assert every[1] == "0.86 (0.86-0.86)"  # the variations of chats do not count
    rows = tables.opponents_table(lines).splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["prefix", "dynamo", "sglang"]
    assert rows[1].split("|")[2].strip() == "0.22"  # of 0.5 and 0.1, each as much


def test_what_telling_gains_is_told_by_layout_with_its_seeds() -> None:
    """A cell with fewer seeds than its neighbours must not look as certain as they do."""
    lines = [
        {
            "situation": situation,
            "policy": policy,
            "seed": seed,
            "ttft_mean_ms": mean,
            "ttft_p99_ms": 10 * mean,
            "avoidable_mean_ms": mean / 2,
        }
        for situation in ("chats", "chats, full")
        for policy, mean, count in (
            ("least_delay", 90.0, 1),
            ("least_delay, told", 60.0, 2),
            ("group_blind", 99.0, 1),
            ("group_blind_any_copy", 100.0, 2),
        )
        if situation == "chats" or ", " not in policy
        for seed in range(count)
    ]
    heads, _, hybrid, full = tables.told_table(lines).splitlines()
    assert heads.startswith("| Layout, situation | seeds | best index without groups, ms |")
    told = "0.60 (0.60-0.60); 0.60 (0.60-0.60)"
    assert hybrid == f"| gpt-oss, chats | 1, -, 2 | 100 | 0.30 | 0.90; 0.90 |  | {told} |"
    assert full == "| full attention, chats | 1, -, - | 100 | 0.45 | 0.90; 0.90 |  |  |"


def test_every_main_situation_exists_and_stands_in_one_row() -> None:
    """A situation in two rows would count twice."""
    names = [name for row in TRAFFIC.values() for name in row]
    assert len(set(names)) == len(names)
    assert set(names) <= SITUATIONS.keys()


def test_seeds_play_parts_of_the_recording_that_exist() -> None:
    """Held-out seeds are larger than the number of parts that a recording has."""
    played = SITUATIONS["trace"].requests / (1 - WARM_UP)
    assert (TRACE_PARTS - 1) * TRACE_STRIDE + played <= MOONCAKE_REQUESTS


def test_a_run_with_newer_code_replaces_the_older_one(tmp_path: Path) -> None:
    """Results of several versions lie in one file."""
    results = Results(tmp_path / "results.jsonl")
    for version, mean in (("1", 1.0), ("2", 2.0)):
        results.add({"situation": "s", "policy": "p", "seed": 1, "version": version, "mean": mean})
    assert results.has("s", "p", 1, "1")
    assert not results.has("s", "p", 2, "1")
    assert [line["mean"] for line in latest(results)] == [2.0]


# --- sensitivity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", misjudged_names(LEAST_DELAY))
def test_a_misjudged_estimate_reaches_the_policy(name: str) -> None:
    """A row of the table that changes nothing would say that nothing matters."""
    request = RouteRequest(model="m", prompt_tokens=4000, prefill_tokens_per_s=8000.0)
    load = Candidate(replica_id="x").load.__class__(
        queued_prefill_tokens=3000, decoding_requests=4, decode_context_tokens=9000
    )
    candidate = Candidate(
        replica_id="a",
        progress_tokens=500.0,
        reuse_probability=0.3,
        arrivals_per_s=1.0,
        uncached_tokens_per_s=2000.0,
        load=load,
    )
    costs = []
    for spelled in (LEAST_DELAY, name):
        misjudgment = Misjudgment(spelled)
        settings = PolicySettings(misjudgment.weights(Weights()))
        policy = misjudgment.around(make_policy(misjudgment.policy, settings))
        costs.append(policy.rank(request, [candidate])[0].cost)
    assert costs[0] != costs[1]


# --- the document ---------------------------------------------------------------------------------


def test_a_document_gets_tables_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures in docs/ are not written by hand; the same figures give the same files."""
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("benchmarks.plot_routing_quality")
    figures, document = tmp_path / "figures.jsonl", tmp_path / "document.md"
    swept(figures)
    document.write_text(
        "before\n<!-- pooled -->\nold\n<!-- end -->\nbetween\n<!-- all -->\n<!-- end -->\n"
        "![](images/ttft.svg)\n"
    )
    monkeypatch.setattr(sys, "argv", ["plot", str(figures), "--document", str(document)])
    plots.main()
    text, image = document.read_text(), tmp_path / "images" / "ttft.svg"
    assert "old" not in text
    assert text.startswith("before\n<!-- pooled -->\n| `least_delay` relative to")
    assert "### documents" in text
    first = image.read_bytes()
    assert first.startswith(b"<?xml")
    plots.main()
    assert (document.read_text(), image.read_bytes()) == (text, first)
