"""A process that tries grammars out: `python -m engine.grammar.check_main`, spoken to by engine/grammar/checker.py.

A grammar is a program of the client's. The library that compiles it has no limit of time, and some texts of a few
kilobytes take minutes, gigabytes, or the whole stack. So each one is compiled here first, where the kernel ends what
takes too much, and only what went well is compiled in the engine.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
from pathlib import Path
from typing import IO

import msgspec

from engine.errors import InvalidRequestError
from engine.grammar.vocabulary import GrammarVocabulary
from engine.params import Constraint
from engine.text.incremental_decoder import load_tokenizer

MAX_CPU_SECONDS = 2  # to compile one grammar; the kernel counts whole seconds
MAX_MEMORY = 2**30  # bytes, beside what the process has with its vocabulary
MAX_STACK = 2**20  # bytes; less than any thread of the engine has
LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message: what grammars are compiled for."""

    tokenizer_path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> GrammarVocabulary:
        """Raises CheckpointError."""
        return GrammarVocabulary(
            load_tokenizer(Path(self.tokenizer_path)), self.vocab_size, self.eos_token_ids
        )


class Verdict(msgspec.Struct, frozen=True):
    """What is wrong with the constraint; empty: nothing."""

    problem: str


def main() -> None:
    # These reach all processes, also where it is the frontend's to end; the end of stdin is the sign to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = read_message(stdin)
    if setup is None:
        return
    vocabulary = msgspec.msgpack.decode(setup, type=Setup).load()
    _limit_space()
    while (message := read_message(stdin)) is not None:
        _limit_cpu()
        verdict = _check(vocabulary, msgspec.msgpack.decode(message, type=Constraint))
        write_message(stdout, msgspec.msgpack.encode(verdict))


def read_message(stream: IO[bytes]) -> bytes | None:
    """None at the end of the stream, also in the middle of a message."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    length = int.from_bytes(header, "little")
    message = stream.read(length)
    return message if len(message) == length else None


def write_message(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
    stream.flush()


def _check(vocabulary: GrammarVocabulary, constraint: Constraint) -> Verdict:
    try:
        vocabulary.compile(constraint)
    except InvalidRequestError as error:
        return Verdict(error.description)
    return Verdict("")


def _limit_cpu() -> None:
    """From now on; SIGXCPU ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = math.ceil(usage.ru_utime + usage.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (used + MAX_CPU_SECONDS, resource.RLIM_INFINITY))


def _limit_space() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    num_bytes = num_pages * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, MAX_STACK))


if __name__ == "__main__":
    main()
