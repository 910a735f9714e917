"""The stages of `python -m tools.train`: their options, and how they are put together from the other modules."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.assembly import resolve_device
from engine.config import ModelConfig
from engine.models.loader import load_model
from engine.spec_decode.gemma4 import DEFAULT_POSITION_POLICY, POSITION_POLICIES
from tools.train import evaluate, recipes
from tools.train.asking import ARTICLE, leads, open_turn, read_asked
from tools.train.budget import Limit
from tools.train.data import drafter_rows, target_data
from tools.train.draft_tasks import AssistantTask, DraftTask, Eagle3Task
from tools.train.loop import LoopSettings, Task, Trainer
from tools.train.optimiser import OptimiserSettings
from tools.train.prompts import Prompt, PromptSource, questions_of
from tools.train.samples import SampleWriter
from tools.train.sampling import Render, SamplingPlan, one_turn, sample_answers
from tools.train.target_task import TargetTask
from tools.train.text_files import read_documents
from tools.train.tokenizer import train_tokenizer, write_tokenizer

_BOOK_CHARACTERS = 160_000  # of each text that a tokenizer is trained on
_NUM_HELD_OUT_SAMPLES = 96
_POLL_SECONDS = 0.2
_SEEDS_OF_A_FILE = 10**9  # more than there are seeds of a command


@dataclass(frozen=True)
class Stage:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def _tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files, plain or .xz")
    parser.add_argument("--vocab-size", type=int, default=recipes.VOCAB_SIZE)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")


def _run_tokenizer(options: argparse.Namespace) -> None:
    texts = [document[:_BOOK_CHARACTERS] for document in read_documents(options.text)]
    write_tokenizer(train_tokenizer(texts, options.vocab_size), options.output)


# ---- sample ---------------------------------------------------------------------------------------------------------


def _engine_arguments(parser: argparse.ArgumentParser, max_tokens: Sequence[int], temperature: float) -> None:
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--tokenizer", help="folder; default: the model's own")
    parser.add_argument("--output", type=Path, required=True, help="folder for *.jsonl.gz")
    parser.add_argument(
        "--time-limit", type=float, required=True, help="seconds, from when the engine is ready"
    )
    parser.add_argument("--limit", type=int, help="answers of each worker at most")
    parser.add_argument("--workers", type=int, default=1, help="engines side by side on the device")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--max-tokens",
        type=int,
        nargs="+",
        default=max_tokens,
        help="of an answer; of several, in turn; default: %(default)s",
    )
    parser.add_argument("--num-seqs", type=int, default=256, help="requests at once, of each worker")
    parser.add_argument("--temperature", type=float, default=temperature, help="default: %(default)s")
    parser.add_argument(
        "--kv-cache-gib", type=evaluate.gibibytes, dest="kv_cache_bytes", help="of each worker"
    )
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    _engine_arguments(parser, [recipes.ASKED_LENGTH], temperature=1.0)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    _engine_arguments(parser, recipes.ANSWER_LENGTHS, temperature=0.8)
    parser.add_argument("--kinds", choices=sorted(recipes.KINDS), default="text", help="which prompts")
    parser.add_argument(
        "--sums", type=Path, nargs="*", default=[], help='files of "Question: ... Answer: ..."'
    )
    parser.add_argument("--passages", type=Path, nargs="*", default=[], help="text files to ask about")
    parser.add_argument(
        "--asked",
        type=Path,
        nargs="*",
        default=[],
        help="folders of `ask`: prompts, and articles to ask about",
    )
    parser.add_argument("--greedy-share", type=float, default=0.25)


def _run_ask(options: argparse.Namespace) -> None:
    _sample(options, leads, open_turn, greedy_share=0.0)


def _run_sample(options: argparse.Namespace) -> None:
    if not 0.0 <= options.greedy_share <= 1.0:
        raise ValueError(f"--greedy-share: got {options.greedy_share}, expected 0 to 1")

    def prompts(seed: int) -> Iterator[Prompt]:
        asked = read_asked(options.asked)
        passages = [*read_documents(options.passages), *asked.pop(ARTICLE, [])]
        sums = questions_of(read_documents(options.sums))
        weights = recipes.KINDS[options.kinds]
        return PromptSource(seed, weights, sums, passages, asked).take(held_out=False)

    _sample(options, prompts, one_turn, options.greedy_share)


def _sample(
    options: argparse.Namespace,
    prompts: Callable[[int], Iterator[Prompt]],
    render: Render,
    greedy_share: float,
) -> None:
    """`prompts`: by seed."""
    if options.worker is None and options.workers > 1:
        _run_workers(options.workers)
        return
    worker = options.worker or 0
    writer = SampleWriter(options.output, f"seed{options.seed}-worker{worker}")
    # A run that goes on behind what is there draws other prompts than that did.
    seed = options.seed * 1000 + worker + writer.num_files * _SEEDS_OF_A_FILE
    plan = SamplingPlan(
        max_tokens=tuple(options.max_tokens),
        min_tokens=recipes.MIN_ANSWER_TOKENS,
        temperatures=((0.0, greedy_share), (options.temperature, 1.0 - greedy_share)),
        num_seqs=options.num_seqs,
        kv_cache_bytes=options.kv_cache_bytes,
        max_model_len=options.max_model_len,
        device=options.device,
        dtype=options.dtype,
        tokenizer=options.tokenizer,
        seed=seed,
    )
    print(
        sample_answers(options.model, plan, prompts(seed), render, writer, options.time_limit, options.limit)
    )


def _run_workers(count: int) -> None:
    """The same command in `count` processes. Raises ValueError when one of them fails; the others end then too."""
    commands = [
        [sys.executable, "-m", "tools.train", *sys.argv[1:], "--worker", str(i)] for i in range(count)
    ]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            process.terminate()
    codes = [process.wait() for process in processes]
    if any(codes):
        raise ValueError(f"workers: got exit statuses {codes}, expected 0 of each")


# ---- what the training stages share ---------------------------------------------------------------------------------


def _positive(text: str) -> float:
    """An option's type."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected more than 0")
    return value


def _count(text: str) -> int:
    """An option's type."""
    return int(_positive(str(int(text))))


def _training_arguments(parser: argparse.ArgumentParser, rows: int, row_length: int) -> None:
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--time-limit", type=_positive, help="seconds of training")
    limit.add_argument("--steps", type=_count, help="steps of training")
    parser.add_argument("--samples", type=Path, nargs="+", required=True, help="folders of *.jsonl.gz")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and report.json")
    parser.add_argument("--state", type=Path, required=True, help="folder for the state to go on from")
    parser.add_argument("--rows", type=_count, default=rows, help="rows of a step; default: %(default)s")
    parser.add_argument("--row-length", type=_count, default=row_length, help="tokens; default: %(default)s")
    parser.add_argument("--learning-rate", type=_positive, help="of matrices")
    parser.add_argument("--table-learning-rate", type=_positive, help="of tables and norms")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)


def _train(task: Task, options: argparse.Namespace, defaults: OptimiserSettings) -> None:
    optimiser = replace(
        defaults,
        learning_rate=options.learning_rate or defaults.learning_rate,
        table_learning_rate=options.table_learning_rate or defaults.table_learning_rate,
    )
    limit = Limit(seconds=options.time_limit, steps=options.steps)
    settings = LoopSettings(limit=limit, optimiser=optimiser, folder=options.state, output=options.output)
    report = Trainer(task, settings).run()
    print({key: value for key, value in report.items() if key not in ("history", "looks")}, flush=True)


# ---- target ---------------------------------------------------------------------------------------------------------


def _target_arguments(parser: argparse.ArgumentParser) -> None:
    _training_arguments(parser, rows=32, row_length=1024)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="prose, plain or .xz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--dropout", type=float, default=recipes.TARGET_DROPOUT, help="default: %(default)s")
    parser.add_argument(
        "--config", type=Path, help="config.json of another Gemma 4; default: that of the recipe"
    )


def _run_target(options: argparse.Namespace) -> None:
    data = target_data(
        options.tokenizer,
        options.text,
        options.samples,
        kinds=recipes.CHAT_KINDS,
        row_length=options.row_length,
        seed=options.seed,
    )
    device = resolve_device(options.device)
    raw = recipes.TARGET_CONFIG if options.config is None else json.loads(options.config.read_text())
    task = TargetTask(
        raw,
        data,
        rows_per_step=options.rows,
        dropout=options.dropout,
        seed=options.seed,
        device=device,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    for path in options.tokenizer.glob("tokenizer*.json"):
        if not (options.output / path.name).exists():
            shutil.copy(path, options.output)
    _train(task, options, recipes.TARGET_OPTIMISER)


# ---- drafters -------------------------------------------------------------------------------------------------------


def _drafter_arguments(parser: argparse.ArgumentParser, rows: int, row_length: int, num_steps: int) -> None:
    _training_arguments(parser, rows, row_length)
    parser.add_argument("--target", required=True, help="directory or GGUF file of the target")
    parser.add_argument(
        "--draft-steps", type=_count, default=num_steps, help="k in training; default: %(default)s"
    )


def _assistant_arguments(parser: argparse.ArgumentParser) -> None:
    _drafter_arguments(parser, rows=32, row_length=1024, num_steps=4)
    shape = recipes.ASSISTANT_SHAPE
    parser.add_argument(
        "--positions",
        choices=sorted(POSITION_POLICIES),
        default=DEFAULT_POSITION_POLICY,
        help="where a draft stands; say the same to serve; default: %(default)s",
    )
    parser.add_argument("--hidden-size", type=int, default=shape["hidden_size"], help="default: %(default)s")
    parser.add_argument(
        "--intermediate-size", type=int, default=shape["intermediate_size"], help="default: %(default)s"
    )
    parser.add_argument(
        "--sliding-layers",
        type=int,
        default=len(shape["layer_types"]) - 1,
        help="before the full one; default: %(default)s",
    )


def _eagle_arguments(parser: argparse.ArgumentParser) -> None:
    _drafter_arguments(parser, rows=32, row_length=768, num_steps=5)
    shape = recipes.HEAD_SHAPE
    parser.add_argument(
        "--intermediate-size", type=int, default=shape["intermediate_size"], help="default: %(default)s"
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        default=shape["draft_vocab_size"],
        help="tokens that can be drafted: those that the target writes most; default: %(default)s",
    )
    parser.add_argument(
        "--share-target-head",
        action="store_true",
        help="draft with the target's output head: the checkpoint has none, so its vocabulary may be large",
    )
    parser.add_argument("--init", type=Path, help="folder of a head to begin with, of the same sizes")


def _run_assistant(options: argparse.Namespace) -> None:
    shape = {
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "layer_types": [recipes.SLIDING] * options.sliding_layers + [recipes.FULL],
    }
    task = _draft_task(AssistantTask, options, shape=shape, policy=options.positions)
    _train(task, options, recipes.ASSISTANT_OPTIMISER)


def _run_eagle(options: argparse.Namespace) -> None:
    shape = {
        "intermediate_size": options.intermediate_size,
        "draft_vocab_size": options.draft_vocab_size,
        "shares_target_head": options.share_target_head,
    }
    _train(_draft_task(Eagle3Task, options, shape=shape, init=options.init), options, recipes.HEAD_OPTIMISER)


def _draft_task(make: type[DraftTask], options: argparse.Namespace, **own: Any) -> DraftTask:
    device = resolve_device(options.device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    target = load_model(ModelConfig.model_validate({"model": options.target, "dtype": dtype}), device=device)
    rows, greedy, sources = drafter_rows(
        options.samples, options.row_length, options.seed, _NUM_HELD_OUT_SAMPLES
    )
    return make(
        target,
        rows,
        greedy,
        num_steps=options.draft_steps,
        rows_per_step=options.rows,
        seed=options.seed,
        device=device,
        sources={"target": Path(options.target).name, **sources},
        **own,
    )


STAGES: Mapping[str, Stage] = {
    "tokenizer": Stage(
        "train a byte-level BPE tokenizer on text files", _tokenizer_arguments, _run_tokenizer
    ),
    "ask": Stage("let a chat model write prompts", _ask_arguments, _run_ask),
    "sample": Stage("sample answers of a model through the engine", _sample_arguments, _run_sample),
    "target": Stage("train a small Gemma 4 on prose and sampled chats", _target_arguments, _run_target),
    "assistant": Stage("train the MTP assistant of a Gemma 4 target", _assistant_arguments, _run_assistant),
    "eagle": Stage("train the EAGLE-3 head of a Llama-family target", _eagle_arguments, _run_eagle),
    "evaluate": Stage("measure drafters through the engine", evaluate.add_arguments, evaluate.run),
}
