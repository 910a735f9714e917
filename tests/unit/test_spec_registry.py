"""What is refused at start, with messages that name what, got and expected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import SpeculatorConfig, engine_config
from engine.errors import CheckpointError, ConfigError, EngineError, InvalidRequestError
from engine.spec_decode.registry import SPECULATORS, init_speculator
from tests.support.engine_harness import request
from tests.support.tiny_drafters import MAX_DRAFTS, Workshop, shared_workshop
from tests.support.tiny_models import make_tiny_checkpoint

HEADS = ("eagle", "eagle3")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


def load(workshop: Workshop, **values: Any) -> None:
    init_speculator(SpeculatorConfig.model_validate(values), workshop.loaded, torch.device("cpu"))


def edited_head(workshop: Workshop, method: str, folder: Path, **changes: Any) -> str:
    """A copy of a fitted head with other config entries."""
    source = workshop.drafter(method).model
    assert source is not None
    shutil.copytree(source, folder / method)
    config = folder / method / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return str(folder / method)


def test_an_unknown_method_is_refused_with_the_known_names(workshop: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"speculator: got 'medusa', expected one of .*eagle3.*ngram"):
        load(workshop, method="medusa")


@pytest.mark.parametrize("method", SPECULATORS.names())
def test_an_unknown_option_is_refused(workshop: Workshop, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculator {method}: got option 'depht', expected one of: "):
        load(workshop, method=method, model="anywhere", options={"depht": "3"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_n": "two"}, r"got min_n='two', expected a whole number"),
        ({"min_n": "5", "max_n": "3"}, r"got min_n 5 and max_n 3, expected 1 <= min_n <= max_n"),
        ({"min_n": "0"}, r"got min_n 0 and max_n 4, expected 1 <= min_n"),
    ],
)
def test_options_out_of_range_are_refused(workshop: Workshop, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(workshop, method="ngram", options=options)


@pytest.mark.parametrize("method", ["draft_model", *HEADS])
def test_a_draft_model_needs_a_path_that_exists(workshop: Workshop, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"speculator {method}: got no model, expected model=PATH"):
        load(workshop, method=method)
    with pytest.raises(CheckpointError, match="/nowhere/at/all: no such file or directory"):
        load(workshop, method=method, model="/nowhere/at/all")


def test_a_draft_model_of_another_vocabulary_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "other", "llama", vocab_size=300)
    with pytest.raises(ConfigError, match=r"draft_model: got a vocabulary of 300 tokens, expected 320"):
        load(workshop, method="draft_model", model=str(other))


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(("key", "got", "expected"), [("hidden_size", 64, 32), ("vocab_size", 300, 320)])
def test_a_head_for_another_target_is_refused(
    workshop: Workshop, method: str, key: str, got: int, expected: int, tmp_path: Path
) -> None:
    model = edited_head(workshop, method, tmp_path, **{key: got})
    with pytest.raises(CheckpointError, match=rf"draft head {key}: got {got}, expected {expected}"):
        load(workshop, method=method, model=model)


@pytest.mark.parametrize("method", HEADS)
def test_tensors_that_do_not_fit_are_named(workshop: Workshop, method: str, tmp_path: Path) -> None:
    model = edited_head(workshop, method, tmp_path)
    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    weights["surplus.weight"] = weights.pop("fc.weight")
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"unknown: surplus\.weight; missing: fc\.weight"):
        load(workshop, method=method, model=model)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.full((200,), 200), r"d2t: got ids outside the vocabulary, expected 0\.\.319"),
        (torch.zeros(199, dtype=torch.int64), r"d2t: got shape \[199\], expected \[200\]"),
        (torch.tensor([1] + [0] * 199), "d2t: got the same id for several draft tokens"),
    ],
)
def test_a_draft_vocabulary_outside_the_target_is_refused(
    workshop: Workshop, offsets: torch.Tensor, message: str, tmp_path: Path
) -> None:
    model = edited_head(workshop, "eagle3", tmp_path)
    file = Path(model) / "model.safetensors"
    save_file({**load_file(file), "d2t": offsets}, file)
    with pytest.raises(CheckpointError, match=message):
        load(workshop, method="eagle3", model=model)


def test_a_draft_vocabulary_that_stands_for_no_tokens_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    model = edited_head(workshop, "eagle3", tmp_path)
    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    del weights["d2t"]
    save_file(weights, file)
    with pytest.raises(
        CheckpointError, match="d2t: missing, expected the tokens that a draft vocabulary of 200"
    ):
        load(workshop, method="eagle3", model=model)


@pytest.mark.parametrize("method", HEADS)
def test_an_embedding_in_a_head_must_be_a_copy_of_the_target_s(
    workshop: Workshop, method: str, tmp_path: Path
) -> None:
    model = edited_head(workshop, method, tmp_path)
    file = Path(model) / "model.safetensors"
    target = workshop.loaded.model
    copy = target.embed(torch.arange(target.vocab_size)).half()
    step = (copy.abs().amax(dim=-1, keepdim=True) / 8).clamp(min=1e-4)
    for same in (copy, (copy / step).round() * step):  # the target's may be of four bits
        save_file({**load_file(file), "embed_tokens.weight": same}, file)
        load(workshop, method=method, model=model)
    for other in (copy.roll(1, 0), copy[:-1], torch.zeros_like(copy)):
        save_file({**load_file(file), "embed_tokens.weight": other.contiguous()}, file)
        with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: got other values than the target"):
            load(workshop, method=method, model=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_output": True}, "norm_output: got True, expected False"),
        ({"parallel_drafting": True}, "parallel_drafting: got True, expected False"),
        ({"logit_scale": 0.5}, r"logit_scale: got 0\.5, expected 1\.0"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: got False, expected True"),
        ({"norm_before_residual": "yes"}, "norm_before_residual: got 'yes', expected true or false"),
        ({"draft_vocab_size": -1}, "draft_vocab_size: got -1, expected a positive whole number"),
    ],
)
def test_a_head_that_would_be_computed_wrongly_is_refused(
    workshop: Workshop, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(workshop, method="eagle3", model=edited_head(workshop, "eagle3", tmp_path, **changes))


def test_an_output_head_that_is_shared_must_be_linear(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = edited_head(workshop, "eagle3", tmp_path, shares_target_head=True)
    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file)
    load(workshop, method="eagle3", model=model)
    target = workshop.loaded.model
    linear = target.compute_logits
    monkeypatch.setattr(target, "compute_logits", lambda hidden: torch.tanh(linear(hidden)))
    with pytest.raises(CheckpointError, match="shares_target_head: got a target whose logits are capped"):
        load(workshop, method="eagle3", model=model)


def test_aux_layers_outside_the_target_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    model = edited_head(workshop, "eagle3", tmp_path, eagle_aux_hidden_state_layer_ids=[0, 1, 3])
    with pytest.raises(
        CheckpointError, match=r"eagle_aux_hidden_state_layer_ids: got layer 3, expected 0\.\.2"
    ):
        load(workshop, method="eagle3", model=model)


def test_two_methods_with_kv_of_their_own_are_refused(workshop: Workshop) -> None:
    with pytest.raises(
        ConfigError, match=r"got 2 with a KV cache of their own \(eagle, draft_model\), expected at most"
    ):
        workshop.core([workshop.drafter("eagle"), workshop.drafter("draft_model")])


@pytest.mark.parametrize("k", [0, 17])
def test_a_k_out_of_range_is_refused_at_start(k: int) -> None:
    with pytest.raises(ConfigError, match=rf"speculators\.0\.k: .*got {k}"):
        engine_config(model={"model": "m"}, speculators=[{"method": "ngram", "k": k}])


def test_a_request_for_what_is_not_loaded_is_refused(workshop: Workshop) -> None:
    core = workshop.core([workshop.drafter("ngram")])
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"method": "eagle"}, r"speculation\.method: got 'eagle', expected one of 'none', 'ngram', 'auto'"),
        ({"method": "ngram", "k": MAX_DRAFTS + 1}, r"num_speculative_tokens: got 6, expected 0\.\.5"),
        ({"method": "ngram", "k": -1}, r"num_speculative_tokens: got -1, expected 0\.\.5"),
    ]
    for wish, message in wishes:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            core.handle(request("r", [260, 261], **wish))
        assert isinstance(caught.value, EngineError)
        assert caught.value.field.startswith("speculation.")


def test_a_method_that_is_named_twice_is_refused() -> None:
    speculators = [{"method": "ngram", "k": 3}, {"method": "ngram", "k": 5}]
    with pytest.raises(ConfigError) as caught:
        engine_config(model={"model": "x"}, speculators=speculators)
    expected = "got ngram, ngram, expected each method once: a request chooses by its name"
    assert str(caught.value) == f"speculators: {expected}"
