"""Small tokenizers of the families that language models use, made on the spot."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not!",
    "def f(x):\n    return x  +  1\n\n    # ha ha ha ha",
    "Grüße aus Köln, naïve café, 你好世界, こんにちは 🙂🙂 👩‍👩‍👧 end",
]
SPECIAL = "<|end|>"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
PLAIN_CHARS = {char for text in CORPUS for char in text if char.isascii() and char not in " \n"} | {"▁"}


def byte_level() -> Tokenizer:
    """As GPT-2, SmolLM2, Qwen: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<\uff5ctool\uff5c>", special=False, normalized=False)])
    return tokenizer


def llama() -> Tokenizer:
    """As Llama 2: BPE over ▁-marked words, byte fallback, one leading space dropped from the text."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """As Gemma: the same without the leading space, in both directions."""
    tokenizer = _byte_fallback_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: Unigram with a Metaspace decoder, no byte fallback."""
    pieces = [
        "<unk>",
        *sorted({char for text in CORPUS for char in text if char != " "}),
        "▁",
        "▁the",
        "▁fox",
        "▁ha",
    ]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


FAMILIES = {"byte_level": byte_level, "llama": llama, "gemma": gemma, "unigram": unigram}


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The token of a single byte."""
    token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
    if token_id is None:
        token_id = tokenizer.token_to_id(_spell(byte))
    assert token_id is not None
    return token_id


def special_id(tokenizer: Tokenizer) -> int:
    token_id = tokenizer.token_to_id(SPECIAL)
    assert token_id is not None
    return token_id


def of_tokens(*tokens: str) -> Tokenizer:
    """A byte-level vocabulary of exactly these texts: ids 0, 1, ... For decoding only.

    A lone surrogate stands for a raw byte, as in `surrogateescape`.
    """
    tokenizer = Tokenizer(models.BPE({_byte_level_spelling(token): i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_level_spelling(token: str) -> str:
    """Bytes of the text (lone surrogates stand for raw bytes) in the printable alphabet of byte-level BPE."""
    return "".join(_spell(byte) for byte in token.encode("utf-8", "surrogateescape"))


def _spell(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in printable]
    return chr(byte) if byte in printable else chr(0x100 + hidden.index(byte))


def _byte_fallback_bpe() -> Tokenizer:
    """Trained on the corpus; characters that are not ASCII have no token of their own."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    texts = ["".join(char for char in text.replace(" ", "▁") if char in PLAIN_CHARS) for text in CORPUS]
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTE_TOKENS, *model["vocab"]])}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer
