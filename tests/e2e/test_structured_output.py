"""Structured output through all processes: protocol, frontend, engine, the process that checks grammars."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2, status_pb2

from server.pb.slipstream.v1 import generation_pb2 as pb
from server.pb.slipstream.v1 import generation_pb2_grpc as pb_grpc
from tools.server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def answer(stub: pb_grpc.GenerationServiceStub, **constraint: Any) -> pb.Choice:
    request = pb.GenerateRequest(
        text="the quick brown fox",
        sampling=pb.SamplingParams(seed=7),
        stopping=pb.StoppingParams(max_tokens=200),
        **constraint,
    )
    (choice,) = stub.GenerateOnce(pb.GenerateOnceRequest(request=request)).choices
    return choice


def test_a_schema(stub: pb_grpc.GenerationServiceStub) -> None:
    choice = answer(stub, json_schema=json.dumps(SCHEMA))
    jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert choice.finished.reason == pb.FINISH_REASON_STOP
    assert choice.finished.WhichOneof("cause") == "constraint_met"
    assert choice.finished.usage.completion_tokens == len(choice.token_ids)


def test_an_expression_a_choice_and_a_grammar(stub: pb_grpc.GenerationServiceStub) -> None:
    assert re.fullmatch(r"\d{3}-[a-c]{2}", answer(stub, regex=r"\d{3}-[a-c]{2}").text)
    assert answer(stub, choice=pb.ChoiceConstraint(choices=["yes", "no"])).text in ("yes", "no")
    assert re.fullmatch("(ab){1,3}c", answer(stub, grammar='root ::= "ab" ("ab" "ab"?)? "c"').text)
    assert re.fullmatch("x+y", answer(stub, grammar='start: "x"+ "y"').text)


def test_any_object(stub: pb_grpc.GenerationServiceStub) -> None:
    choice = answer(stub, json_object=pb.JsonObjectConstraint())
    assert choice.text.startswith("{")
    if choice.finished.reason == pb.FINISH_REASON_STOP:
        assert isinstance(json.loads(choice.text), dict)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json_schema": "{"}, "is not a JSON schema"),
        ({"json_schema": '{"type": "foo"}'}, "Invalid type: foo"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: foo"}, "unknown name"),
    ],
)
def test_what_cannot_be_used_is_an_invalid_argument(
    constraint: dict[str, str], reason: str, stub: pb_grpc.GenerationServiceStub
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        answer(stub, **constraint)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    trailers = dict(caught.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    violations = []
    for detail in status.details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = error_details_pb2.BadRequest()
            detail.Unpack(bad_request)
            violations += bad_request.field_violations
    assert [violation.field for violation in violations] == [f"request.{next(iter(constraint))}"]
    assert reason in violations[0].description


def test_the_command_line(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    command = ["generate", "hi", "--address", server.address, "--seed", "3", "--json-schema", str(path)]
    result = subprocess.run(
        [sys.executable, "-m", "server", *command, "--max-tokens", "200"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    jsonschema.validate(json.loads(result.stdout), SCHEMA)
