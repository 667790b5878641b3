"""The output of the script, and what the plotting script makes of it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import policy_weights, routing_quality
from router.scoring import Weights

IMAGE = "images/conversations-gptoss-2-0.3.svg"
HEADLINE = ("prefix", "group_blind", "group_blind_no_recent", "round_robin")
ARGUMENTS = [
    "--conversations",
    "8",
    "--layout",
    "gptoss",
    "--replicas",
    "2",
    "--cache",
    "0.3",
    "--rate",
    "0.5",
    "2",
    "--policy",
]


def printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, float | str]]:
    monkeypatch.setattr(sys, "argv", ["routing_quality", *ARGUMENTS, *HEADLINE])
    routing_quality.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_case_and_policy_gets_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and plots are made only from these lines."""
    lines = printed(capsys, monkeypatch)
    found = [(line["workload"], line["rate"], line["policy"]) for line in lines]
    assert found == [("conversations", rate, policy) for rate in (0.5, 2.0) for policy in HEADLINE]
    for line in lines:
        assert 0 <= float(line["hit_rate"]) < 1
        assert (
            0
            < float(line["ttft_p50_ms"])
            <= float(line["ttft_p90_ms"])
            <= float(line["ttft_p99_ms"])
        )
        assert float(line["requests_per_s"]) > 0


def test_a_document_gets_tables_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures in docs/ are not written by hand; the same figures give the same files."""
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("benchmarks.plot_routing_quality")
    figures, document = tmp_path / "figures.jsonl", tmp_path / "document.md"
    figures.write_text("".join(json.dumps(line) + "\n" for line in printed(capsys, monkeypatch)))
    document.write_text(
        "before\n<!-- headline -->\nold\n<!-- end -->\nbetween\n<!-- unchanged -->\n<!-- end -->\n"
        + f"![]({IMAGE})\n"
    )
    monkeypatch.setattr(sys, "argv", ["plot", str(figures), "--document", str(document)])
    plots.main()
    text, image = document.read_text(), tmp_path / IMAGE
    assert "old" not in text
    assert text.startswith("before\n<!-- headline -->\n| Workload")
    assert "| conversations, gptoss, 2 replicas | 2 | " in text
    assert "between" in text
    first = image.read_bytes()
    assert first.startswith(b"<?xml")
    plots.main()
    assert (document.read_text(), image.read_bytes()) == (text, first)


def test_seeds_become_their_mean() -> None:
    """The figures of one seed are half chance; a row of a table must not be that of the last
    seed."""
    pytest.importorskip("matplotlib")
    plots = importlib.import_module("benchmarks.plot_routing_quality")
    common = {
        "workload": "w",
        "layout": "full",
        "replicas": 8,
        "cache": 1.0,
        "rate": 1.0,
        "policy": "prefix",
    }
    lines = [{**common, "seed": seed, "hit_rate": rate} for seed, rate in ((0, 0.25), (1, 0.75))]
    other = {**common, "seed": 0, "rate": 2.0, "hit_rate": 1.0}
    merged = plots.means([*lines, other])
    assert [(line["rate"], line["hit_rate"], line["seeds"]) for line in merged] == [
        (1.0, 0.5, 2),
        (2.0, 1.0, 1),
    ]


def test_every_tuned_weight_exists_and_shares_stay_shares() -> None:
    """A weight that was renamed would be tuned in vain."""
    for weight in policy_weights.TUNED:
        tried = list(policy_weights.values(weight))
        assert 0.0 in tried
        assert getattr(Weights(), weight) not in tried
        assert not weight.endswith("_trust") or max(tried) <= 1
