"""From what a client asks of the whole output to a grammar in the language of llguidance, and the limits of grammars.

It knows no vocabulary. What is wrong with a schema, an expression or a grammar is found by whoever compiles it
(engine/grammar/vocabulary.py); here only the notation is translated.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequestError
from engine.params import Constraint

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_IS_LARK = re.compile(r"^\s*(%llguidance\b|[?!]?start\s*:(?!:=))", re.MULTILINE)
ANY_OBJECT = '{"type": "object"}'
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
"""Between the parts of a value white space may stand, but not without end: some models would write nothing else. A
schema may say otherwise under "x-guidance"."""

LIMITS = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # they go to clients
)
"""Well above what schemas in use need; they bound a step. Compiling has limits of its own (check_main.py)."""


def native_grammar(constraint: Constraint) -> str:
    """Raises InvalidRequestError when the text is not even in the notation that it should be in."""
    match constraint.kind:
        case "json_object":
            return _of_schema(ANY_OBJECT)
        case "json_schema":
            return _of_schema(constraint.text)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            texts = (json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
            # One terminal: as alternatives of a rule, each would be an item of the parser's first row (LIMITS).
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))
        case "grammar":
            return LLMatcher.grammar_from_lark(_as_lark(constraint.text))


def _of_schema(text: str) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    except ValueError as error:
        raise InvalidRequestError("json_schema", f"is not a JSON schema: {error}") from None


def _as_lark(text: str) -> str:
    """GBNF, whose rules are written with ::=, or Lark as it stands."""
    if _IS_LARK.search(text):
        return text
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # all that the converter promises to raise
        raise InvalidRequestError(
            "grammar", f"has no rule `start` of Lark, and cannot be read as GBNF: {error}"
        ) from None
    return lark
