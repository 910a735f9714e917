"""The benchmarks of engine steps on tiny geometries: every code path without a GPU, none is tried out on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_service, gpu_steps, sanitizer_run
from benchmarks.geometries import DRAFTERS, GEOMETRIES, with_layers
from benchmarks.gpu_engine import Setup
from benchmarks.gpu_profile import own_times
from server.bench.schema import read_result

# What a geometry has of these is replaced; what it is made of otherwise stays.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "draft_vocab_size": 128,
    "hidden_size_per_layer_input": 8,
    "backbone_hidden_size": 64,
    "sliding_window": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_centroids": 32,
    "centroid_intermediate_top_k": 4,
}


def small(config: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key == "text_config":
            result[key] = small(value)
        else:
            result[key] = SMALL[key] if key in SMALL and value else value
    return result


@pytest.fixture(autouse=True)
def small_geometries(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the table's, under the name small-..., with their drafters."""
    for name, config in list(GEOMETRIES.items()):
        num_layers = 4 if name == "llama-3.1-8b" else 2
        monkeypatch.setitem(GEOMETRIES, f"small-{name}", small(with_layers(config, num_layers)))
    for (name, method), drafter in list(DRAFTERS.items()):
        small_drafter = None if drafter is None else small(drafter)
        monkeypatch.setitem(DRAFTERS, (f"small-{name}", method), small_drafter)


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    output = path / "rows.json"
    lengths = ["--prompt-tokens", "24", "--output-tokens", "12", "--runs", "2"]
    small = ["--device", "cpu", "--kv-cache-bytes", "50000000"]
    gpu_steps.main([*words, *lengths, *small, "--output", str(output)])
    return read_result(output).rows


@pytest.mark.parametrize("geometry", ["smollm2-135m", "llama-3.1-8b", "gemma-4-e4b", "gemma-4-31b"])
def test_plain_rows_and_a_long_prompt(geometry: str, tmp_path: Path) -> None:
    *rows, prefill = run(tmp_path, "--geometry", f"small-{geometry}", "--batch", "1", "3", "--prefill", "40")
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["tpot_ms"] == row["step_ms"] > row["floor_ms"] > 0
        assert row["output_tokens"] == 12
        assert "acceptance" not in row
    assert prefill["prompt_tokens"] == 40
    assert prefill["prefill_ms"] > 0


@pytest.mark.parametrize(
    ("geometry", "method", "k"),
    [
        ("llama-3.1-8b", "ngram", 4),
        ("llama-3.1-8b", "eagle3", 4),
        ("gemma-4-e4b", "gemma4_mtp", 4),
        ("gemma-4-31b", "gemma4_mtp", 4),
        ("deepseek-v2-lite", "mtp", 1),
        ("deepseek-v2-lite", "mtp", 3),
    ],
)
def test_rows_with_drafts_say_that_acceptance_is_synthetic(
    geometry: str, method: str, k: int, tmp_path: Path
) -> None:
    words = ["--geometry", f"small-{geometry}", "--speculator", "none", method, "--k", str(k), "--batch", "2"]
    plain, row = run(tmp_path, *words)
    assert (plain["speculator"], row["speculator"], row["num_drafts"]) == ("none", method, k)
    assert row["acceptance"] == f"synthetic: {min(2, k)} drafts of a step"
    assert 1.0 < row["acceptance_length"] <= 1 + min(2, k)
    assert row["step_ms"] > row["tpot_ms"]
    assert row["floor_ms"] >= plain["floor_ms"]


def test_a_configuration_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {**GEOMETRIES["small-llama-3.1-8b"], "num_key_value_heads": 3}
    monkeypatch.setitem(GEOMETRIES, "small-llama-3.1-8b", broken)
    words = ["--geometry", "small-llama-3.1-8b", "small-smollm2-135m", "--batch", "1"]
    failed, row = run(tmp_path, *words)
    assert failed["geometry"] == "small-llama-3.1-8b"
    assert "CheckpointError" in failed["error"]
    assert row["tpot_ms"] > 0


def test_nothing_is_begun_after_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--geometry", "small-smollm2-135m", "--device", "cpu", "--time-limit", "0"]
    gpu_steps.main([*words, "--output", str(tmp_path / "rows.json")])
    assert "no time is left" in capsys.readouterr().out
    assert not (tmp_path / "rows.json").exists()


def test_the_service_is_measured_by_streams(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    words = ["--geometry", "small-smollm2-135m", "--streams", "1", "3", "--output-tokens", "8", "--runs", "2"]
    gpu_service.main([*words, "--device", "cpu", "--kv-cache-bytes", "50000000", "--output", str(output)])
    rows = read_result(output).rows
    assert [row["streams"] for row in rows] == [1, 3]
    for row in rows:
        assert 0 < row["tpot_ms"] <= row["inter_token_p99_ms"] * 2
        assert row["ttft_ms"] > 0


def test_the_run_for_the_sanitizer_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    sanitizer_run.main(["--device", "cpu", "--graphs", "none"])
    lines = capsys.readouterr().out.splitlines()
    plain, *drafted = (int(line.split(": ")[1].split()[0]) for line in lines)
    assert len(drafted) == 2
    assert max(drafted) < plain  # several tokens in one output


def test_a_rehearsal_has_fewer_layers_of_every_kind() -> None:
    e4b = with_layers(GEOMETRIES["gemma-4-e4b"], 2)
    assert e4b["num_hidden_layers"] == len(e4b["layer_types"]) == 12
    assert e4b["num_kv_shared_layers"] == 6
    assert with_layers(GEOMETRIES["gemma-4-31b"], 7)["num_hidden_layers"] == 12
    assert with_layers(GEOMETRIES["llama-3.1-8b"], 2)["num_hidden_layers"] == 2
    row = Setup("llama-3.1-8b", num_layers=2).describe()
    assert json.dumps(row) == json.dumps(
        {"geometry": "llama-3.1-8b", "speculator": "none", "num_drafts": 0, "num_layers": 2}
    )


def test_kernels_that_begin_early_are_not_counted_twice() -> None:
    spans = [
        (0.0, 2.0),
        (1.0, 3.0),
        (1.5, 1.8),
        (5.0, 6.0),
    ]  # one waits for the first, one runs beside, a gap
    assert own_times(spans) == [2.0, 1.0, 0.0, 1.0]
    assert own_times([]) == []
