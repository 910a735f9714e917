"""The served model's tokenizer and chat template, for the event loop: text in, token ids out, and back.

Long texts are tokenized in a thread, so that streams of others go on meanwhile. Knows no protocol messages
beside the chat prompt, and nothing of requests.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from jinja2 import TemplateError
from tokenizers import Tokenizer

from engine.errors import InvalidRequestError
from engine.params import SamplingParams
from engine.text.renderer import TextRenderer
from engine.text.token_pieces import token_pieces
from server.chat import Conversation, read_conversation
from server.pb.slipstream.v1 import generation_pb2 as pb

MAX_INLINE_SIZE = 4096  # characters or ids; what is longer leaves the event loop. About a millisecond of work
MAX_CHARS = 1_000_000  # of a text that need not fit the context
_NUM_THREADS = 2

Result = TypeVar("Result")


class ChatTokenizer(Protocol):
    """What is used of transformers' PreTrainedTokenizerBase."""

    chat_template: str | dict[str, str] | None

    @property
    def backend_tokenizer(self) -> Tokenizer: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **arguments: Any) -> Any: ...


class TextProcessor:
    """All methods may be called from one event loop; `close` ends the threads."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """Raises CheckpointError for a tokenizer whose text cannot be streamed."""
        self._chat = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may hold settings of the training; a prompt is never cut or padded here.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pieces = token_pieces(self._backend)
        self._reserved_arguments = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
        self._longest_token = max(map(len, self._backend.get_vocab()), default=1)  # characters, at least
        self._token_texts: dict[int, str] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat.chat_template)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text as it stands. Raises InvalidRequestError for one that is more than `max_tokens` in any
        case, or without them longer than MAX_CHARS: tokenizing takes some hundred bytes of memory a character.
        """
        self._check_length("text", text, max_tokens)
        return await self._run(len(text), self._encode, text, add_special_tokens)

    async def encode_chat(
        self, chat: pb.ChatPrompt, *, max_tokens: int | None = None
    ) -> tuple[str, list[int]]:
        """The rendered template and its token ids. Raises InvalidRequestError with a path below `chat`, also as
        `encode` does.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "chat", "the model has no chat template; expected a prompt as text or token ids"
            )
        return await self._run(chat.ByteSize(), self._encode_chat, chat, max_tokens)

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write one of the words, at the start of a text or after a space."""
        return await self._run(2 * sum(map(len, words)), self._encode_words, words)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence, without any clean-up of spaces."""
        return await self._run(len(token_ids), self._decode, token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """What a token adds to a text. At most one entry a token of the vocabulary is kept."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._pieces.piece(token_id).decode(errors="replace")
        return text

    def renderer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextRenderer:
        """A renderer for the output of one request."""
        return TextRenderer(self._backend, params, prompt_token_ids)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, function: Callable[..., Result], *arguments: Any) -> Result:
        if size <= MAX_INLINE_SIZE:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        variants = (variant for word in words for variant in (word, " " + word))
        return tuple(dict.fromkeys(tuple(self._encode(variant, False)) for variant in variants))

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _check_length(self, field: str, text: str, max_tokens: int | None) -> None:
        limit, why = MAX_CHARS, ""
        if max_tokens is not None:
            limit, why = max_tokens * self._longest_token, f": {max_tokens} tokens of this model are no more"
        if len(text) > limit:
            raise InvalidRequestError(field, f"got {len(text)} characters, expected at most {limit}{why}")

    def _encode_chat(self, chat: pb.ChatPrompt, max_tokens: int | None) -> tuple[str, list[int]]:
        rendered = self._render(read_conversation(chat, self._reserved_arguments))
        self._check_length("chat", rendered, max_tokens)
        return rendered, self._encode(rendered, add_special_tokens=False)  # the template writes them

    def _render(self, conversation: Conversation) -> str:
        try:
            rendered: str = self._chat.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                tokenize=False,
                **conversation.template_arguments,
            )
        except TemplateError as error:  # raised by the template itself, for the one who wrote the messages
            raise InvalidRequestError("chat", f"the model's chat template refuses it: {error}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # A template is a program of the checkpoint, and met a message of a shape that it does not expect.
            raise InvalidRequestError(
                "chat", f"the model's chat template fails on it: {type(error).__name__}: {error}"
            ) from None
        return rendered
