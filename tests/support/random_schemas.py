"""Small JSON schemas, drawn at random from the keywords that clients use, each with at least one value that fits."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "id", "name", "tags", "x y", "größe", 'q"')
TEXTS = ("red", "green", "", "naïve", "two words", 'a "quote"', "\n", "🙂")


def random_schema(seed: int) -> dict[str, Any]:
    """The same for the same seed."""
    generator = random.Random(seed)
    return _object(generator, 2) if generator.random() < 0.6 else _value(generator, 2)


def _value(generator: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _integer, _number, _plain, _enum, _const]
    if depth > 0:
        kinds += [_object, _array, _any_of]
    return generator.choice(kinds)(generator, depth)


def _object(generator: random.Random, depth: int) -> dict[str, Any]:
    names = generator.sample(NAMES, generator.randint(0, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(generator, depth - 1) for name in names},
        "required": [name for name in names if generator.random() < 0.7],
    }
    if generator.random() < 0.8:
        schema["additionalProperties"] = False
    elif generator.random() < 0.5:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _array(generator: random.Random, depth: int) -> dict[str, Any]:
    least = generator.randint(0, 2)
    schema = {"type": "array", "items": _value(generator, depth - 1), "minItems": least}
    return schema | ({"maxItems": least + generator.randint(0, 2)} if generator.random() < 0.8 else {})


def _any_of(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(generator, depth - 1) for _ in range(generator.randint(1, 3))]}


def _text(generator: random.Random, depth: int) -> dict[str, Any]:
    match generator.randrange(4):
        case 0:
            return {
                "type": "string",
                "pattern": generator.choice(["^[a-z]{1,4}$", "^(ab|c)+d?$", r"^\d{3}-\d{2}$"]),
            }
        case 1:
            return {"type": "string", "format": generator.choice(["date", "uuid", "ipv4"])}
        case 2:
            return {"type": "string"}
        case _:
            least = generator.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + generator.randint(0, 5)}


def _integer(generator: random.Random, depth: int) -> dict[str, Any]:
    low = generator.randint(-200, 200)
    bounds = {"minimum": low, "maximum": low + generator.randint(0, 300)} if generator.random() < 0.7 else {}
    return {"type": "integer", **bounds}


def _number(generator: random.Random, depth: int) -> dict[str, Any]:
    low = generator.randint(-5, 5)
    bounds = {"minimum": low, "exclusiveMaximum": low + 1.5} if generator.random() < 0.7 else {}
    return {"type": "number", **bounds}


def _plain(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"type": generator.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])}


def _enum(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": generator.sample([*TEXTS, 1, -7, 2.5, True, None], generator.randint(1, 4))}


def _const(generator: random.Random, depth: int) -> dict[str, Any]:
    return {"const": generator.choice([*TEXTS, 0, 12, False, None, [1, 2], {"a": None}])}
