"""Names for the content of full blocks: a chain of hashes, so that equal names mean equal tokens from
position 0 on.

Only confirmed tokens are hashed. Each KV group looks names up in the table of its own pool (block_pool.py),
so one chain serves all groups. Salted: requests of different salts never share a name.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes; an adversary needs 2^64 hashes for one collision
_TOKEN_TYPE = "i"  # 32 bit


def extend_block_hashes(
    block_hashes: list[bytes], token_ids: list[int], num_tokens: int, block_size: int, salt: str
) -> None:
    """Append the hashes of the full blocks among the first `num_tokens` tokens that are not in the list yet.

    Example, block_size 4, 10 tokens, an empty list: the hashes of tokens 0..3 and of tokens 4..7 (given
    0..3).
    """
    num_full = num_tokens // block_size
    if len(block_hashes) >= num_full:
        return
    parent = block_hashes[-1] if block_hashes else _root(salt)
    for index in range(len(block_hashes), num_full):
        tokens = array(_TOKEN_TYPE, token_ids[index * block_size : (index + 1) * block_size])
        parent = blake2b(parent + tokens.tobytes(), digest_size=DIGEST_SIZE).digest()
        block_hashes.append(parent)


def extend_draft_hashes(
    draft_hashes: list[bytes], block_hashes: list[bytes], token_ids: list[int], block_size: int
) -> None:
    """The same for a drafter whose KV of a token depends on the next token too: names of its blocks, up to as many as
    there are in `block_hashes`. Blocks that are equal but for what comes next have different names.
    """
    for index in range(len(draft_hashes), len(block_hashes)):
        next_token = array(_TOKEN_TYPE, token_ids[(index + 1) * block_size : (index + 1) * block_size + 1])
        assert next_token, "a block was named before the token behind it was known"
        name = blake2b(block_hashes[index] + next_token.tobytes(), digest_size=DIGEST_SIZE).digest()
        draft_hashes.append(name)


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=DIGEST_SIZE, person=b"slipstream-salt").digest()
