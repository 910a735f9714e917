"""What each token of a vocabulary adds to the text, as bytes.

Why not `Tokenizer.decode` on a window of ids: text that streams must never change afterwards, and decoding
one token must not cost more at the end of a long answer than at its start. Bytes concatenate; characters do
not. This file reads the decoder of the tokenizer once and knows nothing of requests or streams.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from engine.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """Token id -> bytes, for the decoders that language models use.

    Supported: ByteLevel (GPT-2 and its heirs), Metaspace, Replace / ByteFallback / Fuse / Strip (Llama,
    Gemma), and none (tokens joined by spaces). Raises CheckpointError for a decoder whose text cannot be
    appended to.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_of_char: dict[str, int] | None = None
        self._has_byte_tokens = False
        self._joiner = ""
        self._stripped_prefix = ""  # one of these is not shown at the very start of a text
        self._dropped_at_start = ""  # all of these are not shown in the first token of a text
        if tokenizer.decoder is None:
            self._joiner = " "
        else:
            self._read_decoder(json.loads(tokenizer.decoder.__getstate__()))

    @property
    def replaces_each_byte(self) -> bool:
        """Bytes that form no character show as one U+FFFD each, not as one per broken character."""
        return self._has_byte_tokens

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def piece(self, token_id: int) -> bytes:
        """What the token appends to a text; nothing for an id outside the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = b"" if token is None else self._joiner.encode() + self._bytes_of(token)
            self._pieces[token_id] = piece
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """The same for the first token of a text: some decoders drop a leading space."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._dropped_at_start:
            token = token.replace(self._dropped_at_start, "")
        return self._bytes_of(token).removeprefix(self._stripped_prefix.encode())

    def _bytes_of(self, token: str) -> bytes:
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_of_char is not None:
            values = [self._byte_of_char.get(char) for char in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def _read_decoder(self, decoder: dict[str, Any]) -> None:
        is_fused = False
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            match step:
                case {"type": "ByteLevel"} if not is_fused:
                    self._byte_of_char = _byte_level_alphabet()
                case {"type": "Metaspace", "replacement": str(char)} if not is_fused:
                    self._replacements.append((char, " "))
                    self._dropped_at_start = "" if step["prepend_scheme"] == "never" else char
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if not is_fused:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"} if not is_fused:
                    self._has_byte_tokens = True
                case {"type": "Fuse"}:
                    is_fused = True
                case {"type": "Strip", "content": str(char), "start": 0 | 1 as start, "stop": 0} if is_fused:
                    self._stripped_prefix = char * start
                case _:
                    raise CheckpointError(
                        f"tokenizer: got the decoder step {json.dumps(step)}, expected ByteLevel, Metaspace, "
                        "Replace of a string, ByteFallback, Fuse, or Strip of a leading character after Fuse"
                    )


@lru_cache(maxsize=8)
def token_pieces(tokenizer: Tokenizer) -> TokenPieces:
    """The pieces of this tokenizer object, made once; it must not be changed afterwards."""
    return TokenPieces(tokenizer)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: printable Latin-1 stands for itself, the rest
    counts up from U+0100. Example: byte 0x20 is the 33rd that is not printable and so appears as U+0120.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
