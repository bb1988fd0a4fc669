"""The end-to-end benchmark on two prompts: its output's keys, and what it refuses to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest

from benchmarks import end_to_end

FOLDER = Path(end_to_end.__file__).parent
DESCRIPTOR = FOLDER / "descriptors" / "actions.json"

# The reference's example, key by key.
REFERENCE_KEYS = [
    "mode", "model", "skip_ratio_mean", "skip_ratio_std", "tokens_per_second", "tokens_per_second_vs_grammar",
    "token_accuracy", "forward_passes_saved", "forward_passes_total",
]  # fmt: skip

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "two.txt"
    texts = (FOLDER / "prompts" / "actions.txt").read_text().split(end_to_end.SEPARATOR)
    assert len(texts) >= 20
    file.write_text(end_to_end.SEPARATOR.join(texts[:2]))
    return file


def run(mode: str, prompts: Path, output: Path, *more: object) -> tuple[int, dict[str, Any]]:
    arguments = ["--mode", mode, "--model", models.smollm2_path(), "--prompt", prompts, "--output", output]
    given = [*arguments, "--token-tree-descriptor", DESCRIPTOR, "--checked-steps", 4, *more]
    code = end_to_end.main(list(map(str, given)))
    return code, json.loads(output.read_text()) if code == 0 else {}


@pytest.fixture(scope="module")
def guided(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("guided") / "guided.json"
    code, output = run("strict-guided", prompts, file)
    assert code == 0
    assert output["token_accuracy"] == output["tokens_per_second_vs_grammar"] == 1
    assert output["forward_passes_saved"] == 0
    return file


def test_the_output_and_its_keys(prompts: Path, guided: Path, tmp_path: Path) -> None:
    code, output = run(
        "strict-trie-ffi", prompts, tmp_path / "trie.json", "--tokenization", "every", "--baseline", guided
    )
    assert code == 0
    assert list(output)[: len(REFERENCE_KEYS)] == REFERENCE_KEYS
    assert list(output) == list(json.loads(guided.read_text()))
    assert output["token_accuracy"] == 1
    assert output["differences"] == []
    assert output["valid_set_equal_steps"] == output["valid_set_steps"] == 4
    assert output["model"] == models.smollm2_path().name
    assert 0 < output["skip_ratio_mean"] < 1
    assert "/" not in json.dumps(output["stamp"]["commit"])
    answers = json.loads(guided.read_text())["answers"]
    assert [answer["tokens"] for answer in output["answers"]] == [answer["tokens"] for answer in answers]


def test_the_payloads_own_ids(prompts: Path, guided: Path, tmp_path: Path) -> None:
    code, output = run("strict-trie-ffi", prompts, tmp_path / "trie.json", "--baseline", guided)
    assert code == 0
    assert output["tokenization"] == "payload"
    assert output["forward_passes_saved"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_id": "other"}, "of another model_id"),
        ({"choices_sha256": "other"}, "of another choices_sha256"),
        ({"answers": []}, "of other prompts"),
        ({"mode": "strict-trie-ffi"}, "no output of --mode strict-guided"),
    ],
)
def test_another_baseline_is_refused(
    prompts: Path,
    guided: Path,
    tmp_path: Path,
    change: dict[str, Any],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    baseline = tmp_path / "other.json"
    baseline.write_text(json.dumps(json.loads(guided.read_text()) | change))
    assert run("strict-trie-ffi", prompts, tmp_path / "trie.json", "--baseline", baseline)[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert not (tmp_path / "trie.json").exists()


def test_the_token_ids_of_another_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    payload = json.loads(DESCRIPTOR.read_text())
    payload["descriptors"][0]["leaves"][0]["tokens"] = [10**6]
    (tmp_path / "other.json").write_text(json.dumps(payload))
    (tmp_path / "prompt.txt").write_text("Action:\n")
    arguments = ["--mode", "strict-trie-ffi", "--model", models.smollm2_path(), "--prompt", tmp_path / "prompt.txt"]
    assert end_to_end.main([*map(str, arguments), "--token-tree-descriptor", str(tmp_path / "other.json")]) == 2
    assert "V is 49152" in capsys.readouterr().err


def test_accuracy_counts_the_longer_answer() -> None:
    def answers(*tokens: list[int]) -> end_to_end.Run:
        return end_to_end.Run([end_to_end.Answer(one, 0, 0.0) for one in tokens])

    assert end_to_end.accuracy(answers([1, 2, 3], [4]), answers([1, 2], [4])) == 3 / 4
    assert end_to_end.accuracy(answers([1]), answers([2])) == 0
