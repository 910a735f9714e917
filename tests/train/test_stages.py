"""The stages of tools/train, from text to a pair that drafts: tiny, on the CPU, through their own commands."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.config import ModelConfig, SpeculatorConfig
from engine.models.loader import load_model
from tests.support.engine_harness import Harness
from tests.support.tiny_drafters import shared_workshop
from tests.support.training_bench import ROW_LENGTH, Workbench, report_of
from tools.train.__main__ import main
from tools.train.asking import read_asked
from tools.train.budget import Limit
from tools.train.data import drafter_rows
from tools.train.draft_tasks import AssistantTask
from tools.train.loop import LoopSettings, Trainer
from tools.train.recipes import ASSISTANT_OPTIMISER, FULL, SLIDING
from tools.train.samples import Sample, SampleWriter, read_samples

LONG_RUN, SHORT_RUN = 150, 6  # steps


@cache
def _bench(folder: Path) -> tuple[Workbench, Path]:
    folder.mkdir()
    bench = Workbench(folder)
    bench.train_target("target", LONG_RUN)
    return bench, bench.sample(240)


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return _bench(tmp_path_factory.getbasetemp() / "training")[0]


@pytest.fixture
def own_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target wrote itself."""
    return _bench(tmp_path_factory.getbasetemp() / "training")[1]


def test_a_target_learns_and_its_report_says_from_what(bench: Workbench) -> None:
    report = report_of(bench.folder / "target")
    assert report["history"][0]["loss"] > 5.0
    assert report["held_out"]["chats_loss"] < 1.0
    assert report["data"]["text_files"] == ["stories.txt"]
    assert report["steps"] == LONG_RUN


def test_an_assistant_is_accepted_more_the_longer_it_was_trained(bench: Workbench, own_text: Path) -> None:
    short = bench.train_assistant("short", SHORT_RUN, own_text)
    long = bench.train_assistant("long", LONG_RUN, own_text)
    assert long["held_out"]["greedy_acceptance_length"] > short["held_out"]["greedy_acceptance_length"] + 0.5
    before, after = bench.evaluate("short"), bench.evaluate("long")
    for case, figures in after.items():
        assert figures["acceptance_length"] > before[case]["acceptance_length"] + 0.5


def test_a_run_that_goes_on_ends_where_an_unbroken_one_does(
    bench: Workbench, own_text: Path, tmp_path: Path
) -> None:
    def trainer(name: str) -> Trainer:
        target = load_model(ModelConfig(model=str(bench.folder / "target")), device=torch.device("cpu"))
        rows, greedy, sources = drafter_rows([own_text], ROW_LENGTH, 0, 8)
        shape = {"hidden_size": 24, "intermediate_size": 48, "layer_types": [SLIDING, FULL]}
        task = AssistantTask(
            *(target, rows, greedy),
            shape=shape,
            policy="last_token",
            num_steps=3,
            rows_per_step=4,
            seed=0,
            device=torch.device("cpu"),
            sources=sources,
        )
        limit = Limit(steps=6)
        folder, output = tmp_path / f"{name}-state", tmp_path / name
        return Trainer(
            task, LoopSettings(limit=limit, optimiser=ASSISTANT_OPTIMISER, folder=folder, output=output)
        )

    trainer("unbroken").run()
    trainer("broken").run(stop_at=3)
    taken_up = trainer("broken")
    assert taken_up.step == 3
    taken_up.run()
    unbroken, broken = (load_file(tmp_path / name / "model.safetensors") for name in ("unbroken", "broken"))
    assert all(torch.equal(weight, broken[name]) for name, weight in unbroken.items())


def test_a_command_that_is_given_again_samples_more_and_not_the_same(
    bench: Workbench, tmp_path: Path
) -> None:
    command = [
        "sample",
        "--model",
        bench.folder / "target",
        "--device",
        "cpu",
        "--num-seqs",
        8,
        "--kinds",
        "chat",
    ]
    limits = ["--max-model-len", 128, "--time-limit", 600, "--limit", 8, "--max-tokens", 8]
    for _ in range(2):
        bench.run(*command, *limits, "--output", tmp_path)
    prompts = [sample.prompt for sample in read_samples([tmp_path])]
    assert len(set(prompts)) > len(prompts) / 2 >= 8


@pytest.mark.parametrize("option", ["--steps", "--time-limit", "--rows", "--draft-steps"])
def test_a_run_of_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    limit = [] if option in ("--steps", "--time-limit") else ["--steps", "1"]
    folders = ["--samples", "text", "--output", "model", "--state", "state"]
    with pytest.raises(SystemExit):
        main(["eagle", "--target", "target", *folders, *limit, option, "0"])
    assert "expected more than 0" in capsys.readouterr().err


def test_a_target_writes_prompts_and_answers_them(bench: Workbench, tmp_path: Path) -> None:
    engine = ["--model", bench.folder / "target", "--device", "cpu", "--num-seqs", 8, "--max-model-len", 128]
    limits = ["--time-limit", 600, "--limit", 24, "--max-tokens", 24]
    bench.run("ask", *engine, *limits, "--output", tmp_path / "asked")
    asked = read_asked([tmp_path / "asked"])
    assert asked
    bench.run(
        *("sample", *engine, *limits, "--kinds", "broad", "--asked", tmp_path / "asked"),
        *("--output", tmp_path / "text"),
    )
    answered = {sample.prompt for sample in read_samples([tmp_path / "text"])}
    assert answered & {prompt for prompts in asked.values() for prompt in prompts}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "126"], "expected fewer: none of 1000 prompts leaves so many of 128"),
        (["--greedy-share", "25"], "expected 0 to 1"),
    ],
)
def test_answers_that_cannot_be_sampled_are_refused(
    options: list[str],
    message: str,
    bench: Workbench,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rather than looked for without end."""
    engine = ["--model", str(bench.folder / "target"), "--device", "cpu", "--max-model-len", "128"]
    limits = ["--time-limit", "600", "--output", str(tmp_path / "text"), "--kinds", "chat"]
    assert main(["sample", *engine, *limits, *options]) == 1
    assert message in capsys.readouterr().err


def test_a_head_is_accepted_after_training_on_what_its_target_wrote_and_some_more(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    workshop = shared_workshop(tmp_path_factory)
    writer = SampleWriter(tmp_path / "text", "plain")
    for prompt, result in zip(workshop.prompts, workshop.plain("greedy").values(), strict=True):
        writer.add(
            Sample(
                kind="tokens",
                prompt="",
                answer="",
                prompt_ids=prompt,
                answer_ids=result.token_ids,
                temperature=0.0,
                finish="length",
            )
        )
    writer.flush()
    common = f"""eagle --target {workshop.target_path} --samples {tmp_path / "text"} --rows 4 --row-length {ROW_LENGTH}
        --intermediate-size 40 --draft-vocab-size 200 --draft-steps 3 --learning-rate 0.02
        --table-learning-rate 0.01 --device cpu"""
    for head, steps, more in (
        ("first", LONG_RUN, ""),
        ("head", SHORT_RUN, f"--init {tmp_path / 'first'} --share-target-head"),
    ):
        folders = f" --output {tmp_path / head} --state {tmp_path / head}-state --steps {steps} "
        assert main((common + folders + more).split()) == 0
    assert report_of(tmp_path / "head")["began_with"] == "first"
    config = SpeculatorConfig(method="eagle3", model=str(tmp_path / "head"), k=3)
    results = Harness(workshop.core([config])).run(workshop.requests("greedy", [(None, None)]))
    emitted = [seen.num_emitted for result in results.values() for seen in result.spec]
    assert sum(emitted) / len(emitted) > 2.0
    assert [result.token_ids for result in results.values()] == [
        result.token_ids for result in workshop.plain("greedy").values()
    ]
