"""`slipstream generate`: stream one generation to the terminal, or into a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, TextIO

import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from server.cli.connection import EXIT_INTERRUPTED, open_channel, with_connection
from server.client import Connection
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc


@with_connection
def generate(
    connection: Connection,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or none: read it from stdin.")] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="Ask as a chat message, or continue the text as it stands (any model can)."
        ),
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens at most; else what fits.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; else the model's default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to draw from.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop where this appears; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Show log probabilities and the N best.")
    ] = None,
    json_schema: Annotated[
        typer.FileText | None, typer.Option(help="File with a JSON schema that the answer has to fit.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the answer has to match.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Answer with one of these; to be repeated.")
    ] = None,
    grammar: Annotated[
        typer.FileText | None, typer.Option(help="File with a grammar (Lark or GBNF) of the answer.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Draft method, `auto` or `none`; else the server's. The text is the same."),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=0, help="Drafts per verification; else the method's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each message as a line of JSON.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Show counts and times on stderr.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=1e-3, help="Deadline of the whole call, in seconds.")
    ] = None,
) -> None:
    """Generate text with a running server and show it as it comes.

    Only the generated text goes to stdout, so it can be piped. Exit status:
    0 done, 1 refused or failed, 2 wrong usage, 3 server unavailable,
    130 interrupted.

    Example: slipstream generate "Why is the sky blue?" --max-tokens 64 --stats
    """
    if system is not None and not chat:
        raise typer.BadParameter("a system message needs --chat", param_hint="--system")
    try:
        request = pb.GenerateRequest(
            sampling=pb.SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
            stopping=pb.StoppingParams(max_tokens=max_tokens, stop=stop or []),
            output=pb.OutputParams(logprobs=logprobs),
            speculation=pb.SpeculationParams(method=method, num_speculative_tokens=k),
        )
        _set_constraint(request, json_schema, regex, choice or [], grammar)
        _set_prompt(request, _read_prompt(prompt), chat=chat, system=system)
    except ValueError as error:  # a number that the protocol has no room for, a text that is not UTF-8
        raise typer.BadParameter(f"the request cannot be sent: {error}") from None
    with open_channel(connection) as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout)
        try:
            (_show_json if as_json else _show_text)(call, show_stats=stats)
        except (KeyboardInterrupt, BrokenPipeError):
            call.cancel()  # ends the request in the engine too
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _set_constraint(
    request: pb.GenerateRequest,
    json_schema: TextIO | None,
    regex: str | None,
    choices: list[str],
    grammar: TextIO | None,
) -> None:
    if sum((json_schema is not None, regex is not None, bool(choices), grammar is not None)) > 1:
        raise typer.BadParameter("give one at most", param_hint="--json-schema, --regex, --choice, --grammar")
    if json_schema is not None:
        request.json_schema = json_schema.read()
    if regex is not None:
        request.regex = regex
    if choices:
        request.choice.choices.extend(choices)
    if grammar is not None:
        request.grammar = grammar.read()


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    return sys.stdin.read()


def _set_prompt(request: pb.GenerateRequest, prompt: str, *, chat: bool, system: str | None) -> None:
    if not chat:
        request.text = prompt
        return
    if system is not None:
        request.chat.messages.add(role="system", content=system)
    request.chat.messages.add(role="user", content=prompt)


def _show_json(responses: Iterable[pb.GenerateResponse], *, show_stats: bool) -> None:
    for response in responses:
        print(MessageToJson(response, indent=None, preserving_proto_field_name=True), flush=True)
        if show_stats and response.HasField("finished"):
            _show_stats(response.finished)


def _show_text(responses: Iterable[pb.GenerateResponse], *, show_stats: bool) -> None:
    positions: list[pb.PositionLogprobs] = []
    finished: pb.Finished | None = None
    for response in responses:
        match response.WhichOneof("event"):
            case "delta":
                sys.stdout.write(response.delta.text)
                sys.stdout.flush()
                positions += response.delta.logprobs
            case "finished":
                finished = response.finished
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    if positions:
        _show_logprobs(positions)
    if show_stats and finished is not None:
        _show_stats(finished)


def _show_logprobs(positions: list[pb.PositionLogprobs]) -> None:
    table = Table("token", "id", "logprob", "rank", "most likely")
    for position in positions:
        token = position.token
        top = "  ".join(f"{entry.text!r} {entry.logprob:.3f}" for entry in position.top)
        table.add_row(repr(token.text), str(token.token_id), f"{token.logprob:.3f}", str(token.rank), top)
    Console(stderr=True, markup=False).print(table)


def _show_stats(finished: pb.Finished) -> None:
    usage, timing, speculation = finished.usage, finished.timing, finished.speculation
    parts = [
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached)",
        f"{usage.completion_tokens} tokens",
        f"first after {timing.time_to_first_token * 1e3:.0f} ms",
    ]
    if usage.completion_tokens > 1 and timing.decode > 0:
        parts.append(f"then {(usage.completion_tokens - 1) / timing.decode:.1f} tokens/s")
    if speculation.verifications:
        parts.append(f"acceptance length {speculation.acceptance_length:.2f} ({speculation.method})")
    parts += [f"finish: {describe_finish(finished)}", f"seed {finished.seed}"]
    print(", ".join(parts), file=sys.stderr)


def describe_finish(finished: pb.Finished) -> str:
    """Reason and cause in words, such as `stop (eos_token_id 2)`."""
    reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    cause = finished.WhichOneof("cause")
    return reason if cause is None else f"{reason} ({cause} {getattr(finished, cause)!r})"
