"""Tries grammars out in a process of its own, which a bad one may take down: check_main.py says why.

The process starts with the first grammar, and again after each one that ended it. It ends with this one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import weakref

import msgspec

from engine.errors import InvalidRequestError
from engine.grammar.check_main import MAX_CPU_SECONDS, Setup, Verdict, read_message, write_message
from engine.params import Constraint

COMMAND = (sys.executable, "-m", "engine.grammar.check_main")


class GrammarChecker:
    """For one thread at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, constraint: Constraint) -> None:
        """Wait for the verdict. Raises InvalidRequestError."""
        verdict = self._ask(constraint)
        if verdict.problem:
            raise InvalidRequestError(constraint.kind, verdict.problem)

    def _ask(self, constraint: Constraint) -> Verdict:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_message(process.stdin, msgspec.msgpack.encode(constraint))
            answer = read_message(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return msgspec.msgpack.decode(answer, type=Verdict)
        self._process = None
        return Verdict(_what_it_took(process.wait()))

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _stop, process)
        assert process.stdin is not None
        write_message(process.stdin, msgspec.msgpack.encode(self._setup))
        self._process = process
        return process


def _what_it_took(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"takes more than {MAX_CPU_SECONDS} s to compile"
    return "is too large or too deeply nested to compile"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes the pipes and waits
