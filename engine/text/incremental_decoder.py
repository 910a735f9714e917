"""Token ids to text, one token at a time, append-only: text that was given out never changes.

Used by the frontend to render and by the engine's cut to look for stop strings, so both see the same
characters. There is no clean-up of spaces, and nothing here knows of stop strings or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.text.token_pieces import token_pieces

CONTEXT_TOKENS = 8  # of the prompt that matter; the cut and the renderer must agree, so it is decided here


class IncrementalDecoder:
    """The text of one output.

    The concatenation of all `push` and the final `flush` is `tokenizer.decode(context + ids)` without the
    part of the context. One difference: where byte tokens of a byte-fallback vocabulary do not form valid
    UTF-8, `Tokenizer.decode` replaces their whole run, good characters included; here, good characters
    stay.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Sequence[int], skip_special_tokens: bool) -> None:
        """`context_ids`: the prompt or its end. It tells whether the output begins a text (and so loses a
        leading space); a character begun in it and completed by the output belongs to the output.
        """
        self._pieces = token_pieces(tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._is_at_start = True
        self._incomplete = b""  # the beginning of a character: at most 3 bytes
        for token_id in context_ids[-CONTEXT_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip_special_tokens and self._pieces.is_special(token_id):
            return ""
        if self._is_at_start:
            piece = self._pieces.first_piece(token_id)
            self._is_at_start = not self._pieces.piece(token_id)
        else:
            piece = self._pieces.piece(token_id)
        return self._decode(self._incomplete + piece)

    def flush(self) -> str:
        """What is left of an incomplete character, as replacement characters."""
        rest, self._incomplete = self._incomplete, b""
        return self._replacement(len(rest)) if rest else ""

    def _decode(self, data: bytes) -> str:
        text: list[str] = []
        while True:
            try:
                text.append(data.decode())
                self._incomplete = b""
                break
            except UnicodeDecodeError as error:
                text.append(data[: error.start].decode())
                if error.end == len(data) and error.reason == "unexpected end of data":
                    self._incomplete = data[error.start :]
                    break
                text.append(self._replacement(error.end - error.start))
                data = data[error.end :]
        return "".join(text)

    def _replacement(self, num_bytes: int) -> str:
        return "\ufffd" * (num_bytes if self._pieces.replaces_each_byte else 1)


def load_tokenizer(source: Path | str) -> Tokenizer:
    """From a tokenizer.json, a directory that holds one, or the JSON text itself. Raises CheckpointError."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _parse(source, "the given JSON")
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"tokenizer: cannot read {path}: {error}") from None


def _parse(text: str, where: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for malformed files
        raise CheckpointError(f"tokenizer: {where} is not a valid tokenizer file: {error}") from None
