"""Compiles grammars beside the steps of the engine, and keeps what was compiled.

One thread takes one grammar after the other: checked in another process, then compiled here. The library lets go of the
interpreter meanwhile. It knows no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

from llguidance import LLMatcher

from engine.checkpoint.tokenizer_files import tokenizer_json
from engine.config import ModelConfig
from engine.errors import InvalidRequestError
from engine.grammar.check_main import Setup
from engine.grammar.checker import GrammarChecker
from engine.grammar.vocabulary import GrammarVocabulary
from engine.params import Constraint

MAX_KEPT = 256  # grammars, or what is wrong with them


class GrammarCompiler:
    """For one model. The tokenizer is looked for when the first grammar comes."""

    def __init__(self, model: ModelConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._kept: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()

    def start(self, constraint: Constraint) -> Future[LLMatcher]:
        """The grammar, to be copied for a request, now or later: InvalidRequestError, or CheckpointError. Who does not
        need it any more may cancel it.
        """
        compiled = self._kept.get(constraint)
        if compiled is None or _may_be_tried_again(compiled):
            compiled = self._kept[constraint] = self._thread.submit(self._compile, constraint)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(constraint)
        return compiled

    def _compile(self, constraint: Constraint) -> LLMatcher:
        vocabulary = self._vocabulary  # what is wrong with the tokenizer is no fault of the grammar
        self._checker.check(constraint)
        return vocabulary.compile(constraint)

    @cached_property
    def _setup(self) -> Setup:
        return Setup(
            tokenizer_path=str(tokenizer_json(self._model)),
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )

    @cached_property
    def _checker(self) -> GrammarChecker:
        return GrammarChecker(self._setup)

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return self._setup.load()


def _may_be_tried_again(compiled: Future[LLMatcher]) -> bool:
    """It was cancelled, or it failed, and not because of the grammar: the tokenizer was not there, a process could not
    start.
    """
    if compiled.cancelled():
        return True
    error = compiled.exception() if compiled.done() else None
    return error is not None and not isinstance(error, InvalidRequestError)
