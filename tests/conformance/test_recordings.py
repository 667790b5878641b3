"""Every recorded stream of a real engine: each of its queries must be predicted to the token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.recordings import ReplaySummary, replay

STREAMS = sorted((Path(__file__).parent / "streams").glob("*.jsonl.gz"))


@pytest.mark.parametrize("learn_layout", [False, True], ids=["header", "learned"])
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_every_query_of_a_recording_is_predicted_to_the_token(
    path: Path, learn_layout: bool
) -> None:
    """Exact means all of them: a router that is wrong on one prompt in a hundred sends it to the
    wrong replica."""
    summary = ReplaySummary(path.name, learn_layout)
    wrong = [
        prediction
        for prediction in replay(path, learn_layout, summary)
        if prediction.predicted != prediction.hit
    ]
    assert wrong == []
    assert summary.queries > 50
    assert summary.hit_tokens > 0
    assert summary.malformed == 0


def test_the_command_prints_a_line_per_query_and_a_summary() -> None:
    """The command's output is read by programs."""
    done = _kvroute("replay", str(STREAMS[0]))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert all({"predicted", "hit"} <= line.keys() for line in lines[:-1])
    assert lines[-1]["summary"] is True
    assert lines[-1]["queries"] == lines[-1]["exact"] == len(lines) - 1


def test_the_command_fails_when_a_prediction_differs(tmp_path: Path) -> None:
    """A check that cannot fail checks nothing."""
    recording = tmp_path / "wrong.jsonl"
    header = {
        "groups": [{"kind": "full_attention", "block_size": 16}],
        "hash_block_size": 16,
        "scheduler_block_size": 16,
    }
    recording.write_text(
        json.dumps(header) + "\n" + json.dumps({"query": [1] * 40, "hit": 16}) + "\n"
    )
    done = _kvroute("replay", str(recording))
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["differ"] == 1


@pytest.mark.parametrize(
    "text",
    ["", "no json\n", '{"groups": [{"kind": "sliding_window", "block_size": 16}]}\n', "{}\n{}\n"],
)
def test_a_file_that_is_not_a_recording_is_refused_with_line_and_rule(
    tmp_path: Path, text: str
) -> None:
    """Users see what is wrong instead of a traceback."""
    recording = tmp_path / "broken.jsonl"
    recording.write_text(text)
    done = _kvroute("replay", str(recording))
    assert done.returncode == 2
    assert done.stderr.startswith("kvroute: ")
    assert "line " in done.stderr
    assert "Traceback" not in done.stderr


def _kvroute(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
