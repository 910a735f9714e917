"""Requests whose output has a grammar: they wait until it is compiled, and every step that samples for them waits for
the tokens that may be drawn.

It knows requests and steps; what a grammar is, engine/grammar/ knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from llguidance import LLMatcher

from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequestError, RequestFailedError
from engine.finish import GrammarCutter
from engine.grammar.bitmask import MaskedRequest, MaskMaker
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import GrammarMatcher
from engine.params import Constraint
from engine.request import Request
from engine.step import HostInputs, RowResult, StepPlan

logger = logging.getLogger(__name__)

Compile = Callable[[Constraint], "Future[LLMatcher]"]


@dataclass
class _Guided:
    matcher: GrammarMatcher
    next_draft_ids: list[int] = field(default_factory=list)  # in its row, as far as collected steps tell
    num_allowed: int = 0  # drafts of the step that was provided last


class Grammars:
    """One per engine. All methods belong to the engine's thread."""

    def __init__(self, compile_grammar: Compile, vocab_size: int) -> None:
        """`compile_grammar` may raise InvalidRequestError; its result, any EngineError."""
        self.compile = compile_grammar
        self._masks = MaskMaker(vocab_size)
        self._compiling: dict[Request, Future[LLMatcher]] = {}
        self._guided: dict[Request, _Guided] = {}

    def __len__(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    # ---- requests ------------------------------------------------------------------------------------------

    def hold(self, request: Request, compiled: Future[LLMatcher]) -> None:
        """A new request, until `take` returns it."""
        self._compiling[request] = compiled

    def take(self) -> tuple[list[Request], list[tuple[Request, EngineError]]]:
        """Those whose grammar is there, and those whose grammar is none."""
        ready, failed = [], []
        for request, compiled in list(self._compiling.items()):
            if not compiled.done():
                continue
            error = compiled.exception()
            if error is not None:
                failed.append((request, _as_engine_error(error)))
                continue
            del self._compiling[request]
            matcher = GrammarMatcher(compiled.result().deep_copy())
            self._guided[request] = _Guided(matcher)
            request.cutter = GrammarCutter(request.cutter, matcher)
            ready.append(request)
        return ready, failed

    def wait(self, seconds: float) -> None:
        """Until a grammar is there, at most so long."""
        wait(self._compiling.values(), timeout=seconds, return_when=FIRST_COMPLETED)

    def forget(self, request: Request) -> bool:
        """The request has ended. Did it wait for its grammar?"""
        self._guided.pop(request, None)
        compiled = self._compiling.pop(request, None)
        if compiled is not None and compiled not in self._compiling.values():
            compiled.cancel()  # unless it has begun: nobody needs it now, and others wait behind it
        return compiled is not None

    def error_of(self, request: Request) -> str:
        """Why its grammar cannot go on; empty if it can, or if there is none."""
        guided = self._guided.get(request)
        return "" if guided is None else guided.matcher.error

    # ---- drafts ----------------------------------------------------------------------------------------------

    def complete_drafts(self, request: Request, draft_ids: list[int], max_drafts: int) -> list[int]:
        """What is worth verifying of drafts from the host: not what the grammar rules out, but what it forces."""
        guided = self._guided.get(request)
        return draft_ids if guided is None else guided.matcher.complete_drafts(draft_ids, max_drafts)

    # ---- steps ---------------------------------------------------------------------------------------------

    def host_inputs(self, plan: StepPlan, requests: Sequence[Request]) -> HostInputs:
        """What the step may draw; all steps before it have been collected. `requests`: those of the plan."""
        items: list[MaskedRequest] = []
        logits_rows: list[int] = []
        members: list[_Guided] = []
        first = 0
        for request, entry in zip(requests, plan.scheduled, strict=True):
            num_rows = 1 + entry.num_drafts if entry.samples else 0
            guided = self._guided.get(request)
            if guided is not None and num_rows > 0:
                draft_ids = plan.host_drafts.get(entry.row, guided.next_draft_ids)[: entry.num_drafts]
                items.append(MaskedRequest(guided.matcher, num_rows, draft_ids, request.stop_ids))
                logits_rows += range(first, first + num_rows)
                members.append(guided)
            first += num_rows
        if not items:  # they have ended meanwhile
            return HostInputs()
        masks, nums_allowed = self._masks.make(items)
        for guided, num_allowed in zip(members, nums_allowed, strict=True):
            guided.num_allowed = num_allowed
        return HostInputs(token_bitmask=masks.tobytes(), masked_rows=logits_rows)

    def note(self, request: Request, result: RowResult) -> None:
        """A step was collected: keep the drafts that it made, and tell which ones the grammar had ruled out."""
        guided = self._guided.get(request)
        if guided is None:
            return
        guided.next_draft_ids = result.next_draft_ids
        if result.num_accepted == guided.num_allowed < result.num_drafted:
            result.num_ruled_out = result.num_drafted - result.num_accepted


def make_grammars(config: EngineConfig, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """For an engine with this configuration."""
    if config.synthetic_acceptance is not None:
        return Grammars(_refuse, vocab_size)
    return Grammars(GrammarCompiler(config.model, vocab_size, eos_token_ids).start, vocab_size)


def _refuse(constraint: Constraint) -> Future[LLMatcher]:
    """Drafts are accepted whatever the target says."""
    raise InvalidRequestError(
        constraint.kind, "cannot be kept with synthetic acceptance, expected no constraint"
    )


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    logger.error("compiling a grammar failed", exc_info=error)
    return RequestFailedError("its grammar could not be compiled")
