"""Whether a request could ever run to its end: the context and the whole KV cache bound it. Knows no load."""

from __future__ import annotations

from engine.errors import InvalidRequestError
from engine.messages import AddRequest
from engine.scheduler.kv_manager import KVManager


class RequestLimits:
    """Of one engine."""

    def __init__(self, kv: KVManager, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._capacity = kv.longest_request(max_model_len)

    def token_limit(self, message: AddRequest) -> int:
        """Prompt and output at most."""
        return min(len(message.prompt_token_ids) + message.params.max_tokens, self._max_model_len)

    def check(self, message: AddRequest) -> None:
        """Raise InvalidRequestError for a request that could never run to its end."""
        num_prompt_tokens, capacity = len(message.prompt_token_ids), self._capacity
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "got no tokens, expected at least one")
        if num_prompt_tokens >= self._max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"got {num_prompt_tokens} tokens, expected at most {self._max_model_len - 1}: "
                f"prompt and output together fit {self._max_model_len}",
            )
        if num_prompt_tokens >= capacity:
            raise InvalidRequestError(
                "prompt",
                f"got {num_prompt_tokens} tokens, expected at most {capacity - 1}: the whole KV cache",
            )
        if self.token_limit(message) > capacity:
            raise InvalidRequestError(
                "max_tokens",
                f"got {message.params.max_tokens}, expected at most {capacity - num_prompt_tokens}: with "
                f"{num_prompt_tokens} prompt tokens more does not fit the KV cache of {capacity} tokens",
            )
