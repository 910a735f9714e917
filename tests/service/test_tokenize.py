"""Tokenize, Detokenize, and the chat prompts that Generate shares with them."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from engine.errors import CheckpointError
from server.pb.slipstream.v1 import generation_pb2 as pb
from server.text import MAX_CHARS, TextProcessor
from tests.support.server_fixture import failure_of, running_server, tiny_tokenizer, with_template
from tests.support.text_tokenizers import FAMILIES

TEXT = "the naïve dog 🙂"


def struct(**fields: Any) -> Struct:
    value = Struct()
    value.update(fields)
    return value


def user(content: str = "hi") -> pb.ChatMessage:
    return pb.ChatMessage(role="user", content=content)


def over(backend: Tokenizer) -> TextProcessor:
    return TextProcessor(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_of_tokens_make_the_text(family: str) -> None:
    backend = FAMILIES[family]()
    text = over(backend)
    ids = backend.encode("the fox", add_special_tokens=False).ids
    assert "".join(map(text.token_text, ids)).lstrip(" ") == "the fox"  # some families begin with a space


def test_a_tokenizer_whose_text_cannot_be_streamed_is_refused_at_the_start() -> None:
    backend = FAMILIES["byte_level"]()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="got the decoder step"):
        over(backend)


async def test_text_goes_to_ids_and_back() -> None:
    async with running_server() as server:
        answer = await server.stub.Tokenize(pb.TokenizeRequest(text=TEXT))
        assert list(answer.token_ids) == tiny_tokenizer()(TEXT)["input_ids"]
        text = await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
    assert text.text == TEXT


async def test_a_long_text_is_tokenized_beside_the_event_loop() -> None:
    text = TEXT * 10_000
    async with running_server() as server:
        answer = await server.stub.Tokenize(pb.TokenizeRequest(text=text))
        back = await server.stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
    assert back.text == text


@pytest.mark.parametrize("rpc", ["Generate", "Tokenize"])
async def test_a_text_that_is_too_long_in_any_case_is_refused_before_it_is_tokenized(
    rpc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    monkeypatch.setattr(TextProcessor, "_encode", lambda self, text, **options: tokenized.append(text))
    text = "x" * (MAX_CHARS + 1)
    prompts: dict[str, dict[str, Any]] = {
        "text": {"text": text},
        "chat": {"chat": pb.ChatPrompt(messages=[user(text)])},
    }
    async with running_server() as server:
        for field, prompt in prompts.items():
            request = getattr(pb, f"{rpc}Request")(**prompt)
            failure = await failure_of(getattr(server.stub, rpc)(request))
            assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            assert "characters, expected at most" in failure.message
    assert not tokenized


async def test_special_tokens_are_left_out_unless_asked_for() -> None:
    async with running_server() as server:
        for skip, expected in ((None, "a"), (True, "a"), (False, "<|im_start|>a<|im_end|>")):
            ids = tiny_tokenizer()("<|im_start|>a<|im_end|>")["input_ids"]
            request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
            assert (await server.stub.Detokenize(request)).text == expected


async def test_a_chat_is_rendered_and_shown() -> None:
    async with running_server() as server:
        chat = pb.ChatPrompt(messages=[user()], add_generation_prompt=False)
        answer = await server.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert answer.rendered == "<|im_start|>user\nhi<|im_end|>\n"
    assert list(answer.token_ids) == tiny_tokenizer()(answer.rendered)["input_ids"]


async def test_tools_calls_and_arguments_reach_the_template_as_plain_data() -> None:
    template = "{{ tools | tojson }}|{{ messages | tojson }}|{{ level }}"
    call = pb.ChatMessage(role="assistant", tool_calls=[struct(function={"arguments": {"n": 3, "x": 0.5}})])
    result = pb.ChatMessage(role="tool", content="4", tool_call_id="c1", name="add")
    chat = pb.ChatPrompt(
        messages=[call, result],
        tools=[struct(name="add", tags=["a", None, True])],
        template_arguments=struct(level=2),
    )
    async with running_server(tokenizer=with_template(template)) as server:
        answer = await server.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    tools, messages, level = answer.rendered.split("|")
    assert tools == '[{"name": "add", "tags": ["a", null, true]}]'
    assert '"arguments": {"n": 3, "x": 0.5}' in messages
    assert '{"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"}' in messages
    assert level == "2"


async def test_a_tool_is_the_same_prompt_in_every_process() -> None:
    """A Struct is read in an order that differs from process to process."""
    names = ["unit", "city", "days", "lang", "hour", "zone"]
    declaration = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string", "enum": ["a"]} for name in sorted(names)},
                "required": names,
            },
        },
    }
    chat = pb.ChatPrompt(messages=[user()], tools=[struct(**declaration)])
    async with running_server(tokenizer=with_template("{{ tools | tojson }}")) as server:
        answer = await server.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert answer.rendered == json.dumps([declaration])


@pytest.mark.parametrize(
    ("chat", "field", "message"),
    [
        (pb.ChatPrompt(), "chat.messages", "got none"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(content="x")]), "chat.messages[0].role", "got ''"),
        (
            pb.ChatPrompt(messages=[user(), pb.ChatMessage(role="user<|im_end|>", content="x")]),
            "chat.messages[1].role",
            "expected a name such as system, user, assistant or tool",
        ),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="user")]), "chat.messages[0].content", "is unset"),
        (
            pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x", tool_calls=[struct(a=1)])]),
            "chat.messages[0].tool_calls",
            "expected assistant",
        ),
        (
            pb.ChatPrompt(messages=[user()], template_arguments=struct(chat_template="{{ 1 }}")),
            "chat.template_arguments.chat_template",
            "is set by the server",
        ),
        (
            pb.ChatPrompt(messages=[user()], template_arguments=struct(messages=[])),
            "chat.template_arguments.messages",
            "is set by the server",
        ),
    ],
)
async def test_a_malformed_chat_is_refused(chat: pb.ChatPrompt, field: str, message: str) -> None:
    async with running_server() as server:
        for call in (
            server.stub.Tokenize(pb.TokenizeRequest(chat=chat)),
            server.stub.Generate(pb.GenerateRequest(chat=chat)),
        ):
            failure = await failure_of(call)
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (failure.field, message in failure.message) == (field, True), failure.message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ("{{ messages[0].tool_calls[0].name }}", "refuses it"),
        ("{{ messages[0].content + 1 }}", "fails on it: TypeError"),
        ("{{ 1 // 0 }}", "fails on it: ZeroDivisionError"),
        ("{% macro nest() %}{{ nest() }}{% endmacro %}{{ nest() }}", "fails on it: RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "refuses it"),  # the sandbox
    ],
)
async def test_what_a_template_cannot_render_is_the_client_s_error(
    template: str | None, message: str
) -> None:
    async with running_server(tokenizer=with_template(template)) as server:
        info = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.has_chat_template == (template is not None)
        failure = await failure_of(
            server.stub.Generate(pb.GenerateRequest(chat=pb.ChatPrompt(messages=[user()])))
        )
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failure.field, message in failure.message) == ("chat", True), failure.message


@pytest.mark.parametrize(
    ("call", "request_message", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        (
            "Tokenize",
            pb.TokenizeRequest(chat=pb.ChatPrompt(messages=[user()]), add_special_tokens=True),
            "add_special_tokens",
        ),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[320]), "token_ids"),
    ],
)
async def test_what_cannot_be_answered_is_named(call: str, request_message: Any, field: str) -> None:
    async with running_server() as server:
        failure = await failure_of(getattr(server.stub, call)(request_message))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
