"""What the demo chooses to show, and how it sums up."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.pb.slipstream.v1 import generation_pb2 as pb
from tools.demo import DEFAULT_MODEL, Outcome, acceptance_length, best_dtype, choose_show, comparison


def outcome(tokens: int, seconds: float, verifications: int = 0, length: float = 0.0) -> Outcome:
    finished = pb.Finished(
        usage=pb.Usage(completion_tokens=tokens),
        speculation=pb.SpeculationStats(verifications=verifications, acceptance_length=length),
    )
    return Outcome(finished=finished, time_to_first_token=1.0, total=1.0 + seconds)


@pytest.mark.parametrize(("model", "method"), [(DEFAULT_MODEL, "gemma4_mtp"), ("smollm2", "eagle3")])
def test_models_are_shown_with_the_drafter_that_comes_with_the_project(model: str, method: str) -> None:
    show = choose_show(model, [])
    assert show.methods == [method, "ngram", "suffix"]
    drafter = dict(pair.split("=") for pair in show.speculators[0].split(",")[1:])["model"]
    assert (Path(drafter) / "model.safetensors").exists()


def test_the_default_model_is_in_the_project_and_needs_no_download() -> None:
    assert (Path(choose_show(DEFAULT_MODEL, []).model) / "model.safetensors").exists()


def test_any_other_model_is_shown_with_what_needs_no_model() -> None:
    show = choose_show("some/checkpoint", [])
    assert (show.model, show.methods) == ("some/checkpoint", ["ngram", "suffix"])


def test_what_the_user_wants_to_draft_is_all_that_drafts() -> None:
    wanted = "gemma4_mtp,model=assistant,k=4"
    assert choose_show("pair", [wanted]).speculators == (wanted,)
    assert choose_show(DEFAULT_MODEL, [wanted]).speculators == (wanted,)


@pytest.mark.parametrize(
    ("flags", "expected"), [("avx2 avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16"), ("avx2", "float32")]
)
def test_the_dtype_is_one_that_the_cpu_multiplies(flags: str, expected: str, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags : {flags}\n")
    assert best_dtype(info, gpu=tmp_path / "none") == expected
    assert best_dtype(info, gpu=info) == "auto"


def test_rates_leave_out_the_first_token_and_ratios_are_by_prompt() -> None:
    outcomes = {
        "none": [outcome(11, 1.0), outcome(11, 2.0)],
        "gemma4_mtp": [outcome(11, 0.5, 2, 4.0), outcome(11, 1.0, 6, 2.0)],
    }
    table = comparison(outcomes)
    cells = [list(column.cells) for column in table.columns]
    assert cells[1] == ["7.5", "15.0"]
    assert cells[2] == ["1.00x", "2.00x"]
    assert cells[3] == ["-", "2.50"]


def test_the_acceptance_length_weighs_verifications() -> None:
    assert acceptance_length([outcome(5, 1.0, 2, 4.0), outcome(5, 1.0, 6, 2.0)]) == 2.5
    assert acceptance_length([outcome(5, 1.0)]) == 0.0
