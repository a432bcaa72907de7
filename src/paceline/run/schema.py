"""JSON Schemas of the files in a run folder, generated from their types; `paceline schema` prints them."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any

from paceline.run.liveness import Owner
from paceline.run.records import LINES, MINOR, NODE_LINES, SCHEMA, STATUSES, Bench, Environment, Line, Summary
from paceline.strict_json import LARGEST, Bounds

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
BASIC: dict[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    Any: {},
}


def schemas(figures: Mapping[str, type[Any]], lines: Iterable[type[Line]]) -> dict[str, Schema]:
    """By the name of the file, with what strategies add: the types of their figures by name, and kinds of lines."""
    summary = of_type(Summary)
    summary["properties"]["schema"] = {"const": SCHEMA}
    summary["properties"]["status"] = {"enum": list(STATUSES)}
    own = {name: of_type(kind) for name, kind in figures.items()}
    summary["properties"]["figures"] = {"type": "object", "properties": own}
    return {
        "summary": titled("summary.json", summary),
        "env": titled("env.json", of_type(Environment)),
        "owner": titled("owner.json", of_type(Owner)),
        "bench": titled("bench.json", of_type(Bench)),
        "rank": titled("A line of rank_N.jsonl", _one_of((*LINES, *dict.fromkeys(lines)))),
        "node": titled("A line of node_NAME.jsonl", _one_of(NODE_LINES)),
    }


def titled(title: str, schema: Schema) -> Schema:
    return {"$schema": DIALECT, "title": title, "$comment": f"version {SCHEMA}.{MINOR}", **schema}


def _one_of(kinds: Iterable[type[Line]]) -> Schema:
    each = []
    for kind in kinds:
        schema = of_type(kind)
        schema["properties"] = {"kind": {"const": kind.kind}, **schema["properties"]}
        schema["required"] = ["kind", *schema.get("required", [])]
        each.append(schema)
    return {"oneOf": each}


def _item(kind: Any) -> Schema:
    """What a list or table has; a number that was not finite is null."""
    return {"anyOf": [of_type(kind), {"type": "null"}]} if kind is float else of_type(kind)


def of_type(kind: Any) -> Schema:
    """The values that `paceline.strict_json.build` takes for this type. Later minor versions may add fields."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [of_type(arguments[0]), {"type": "null"}]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _item(arguments[1])}
    if origin in (list, tuple):
        return {"type": "array", "items": _item(arguments[0])}
    if origin is Annotated:
        bounds: Bounds = arguments[1]
        limits = {"minimum": bounds.least} | ({"maximum": bounds.most} if bounds.most < LARGEST else {})
        return {"type": "integer" if arguments[0] is int else "number", **limits}
    if not is_dataclass(kind):
        return dict(BASIC[kind])
    hints, init = typing.get_type_hints(kind, include_extras=True), [f for f in fields(kind) if f.init]
    required = [f.name for f in init if f.default is MISSING and f.default_factory is MISSING]
    text = " ".join((kind.__doc__ or "").split())
    return {
        **({"description": text} if text else {}),
        "type": "object",
        "properties": {f.name: of_type(hints[f.name]) for f in init},
        **({"required": required} if required else {}),
    }
