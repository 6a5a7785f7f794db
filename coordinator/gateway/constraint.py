"""Structured output of a public request: from OpenAI's and vLLM's field names to one `Constraint`. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema

from coordinator.gateway.fields import Fields, check_unicode, nests_deeper, shown
from engine.sampling import Constraint
from protos.errors import Code, SplitpointError, invalid

MAX_SCHEMA_DEPTH = 64
MAX_CONSTRAINT_CHARS = 65536
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "disable_fallback", "backend")


def from_openai(fields: Fields) -> Constraint | None:
    """`response_format`, vLLM's `structured_outputs` or its older `guided_*` fields; at most one of them.

    Raises:
        SplitpointError: naming the field that is wrong, or the two that contradict each other.
    """
    found: list[tuple[str, Constraint]] = []
    for name, kind in _GUIDED.items():
        if fields.has(name):
            found.append((name, _build(name, kind, fields.get(name))))
    if fields.has("structured_outputs"):
        found.extend(_structured_outputs(fields.get("structured_outputs")))
    if fields.has("response_format"):
        constraint = _response_format(fields.get("response_format"))
        if constraint is not None:
            found.append(("response_format", constraint))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise invalid(found[1][0], f"{names} cannot be given together: at most 1 constraint")
    return found[0][1] if found else None


def from_proto(kind: str | None, value: Any, prefix: str) -> Constraint | None:
    """The `constraint` oneof of the gRPC request; `kind` is the field that is set."""
    if kind is None:
        return None
    path = prefix + kind
    if kind == "json_object":
        if not value:
            raise invalid(path, f"{path} must be true or absent")
        return Constraint(json_object=True)
    return _build(path, "json" if kind == "json_schema" else kind, value)


def _structured_outputs(value: Any) -> list[tuple[str, Constraint]]:
    path = "structured_outputs"
    if not isinstance(value, Mapping):
        raise invalid(path, f"{path} must be an object, got {shown(value)}")
    for name in value:
        if name in _OPTIONS and value[name]:
            raise SplitpointError(Code.UNSUPPORTED_FIELD, f"{path}.{name} is not supported", param=f"{path}.{name}")
        if name not in _OPTIONS and name not in _KINDS:
            raise invalid(f"{path}.{name}", f"{path}.{name} is not one of {', '.join(_KINDS)}")
    kinds = [k for k in _KINDS if value.get(k) is not None and value.get(k) is not False]
    if not kinds:
        raise invalid(path, f"{path} must hold 1 of {', '.join(_KINDS)}, got none")
    return [(f"{path}.{k}", _build(f"{path}.{k}", k, value[k])) for k in kinds]


def _response_format(value: Any) -> Constraint | None:
    path = "response_format"
    if not isinstance(value, Mapping):
        raise invalid(path, f"{path} must be an object, got {shown(value)}")
    kind = value.get("type")
    if kind not in _FORMATS:
        raise invalid(f"{path}.type", f"{path}.type must be one of {', '.join(_FORMATS)}, got {shown(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(json_object=True)
    if kind == "structural_tag":
        return _build(path, kind, json.dumps(value))
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, Mapping) or wrapper.get("schema") is None:
        raise invalid(f"{path}.json_schema", f"{path}.json_schema.schema is missing; type json_schema needs it")
    return _build(f"{path}.json_schema.schema", "json", wrapper["schema"])


def _build(path: str, kind: str, value: Any) -> Constraint:
    if kind == "json_object":
        if value is not True:
            raise invalid(path, f"{path} must be true or absent, got {shown(value)}")
        return Constraint(json_object=True)
    if kind == "choice":
        return Constraint(choice=_choices(path, value))
    if kind == "json" and isinstance(value, Mapping):
        text = _bounded(path, json.dumps(value))
        check_schema(path, text)
        return Constraint(json_schema=text)
    if not isinstance(value, str) or not value:
        wanted = "a JSON schema, an object or its text" if kind == "json" else "a non-empty string"
        raise invalid(path, f"{path} must be {wanted}, got {shown(value)}")
    check_unicode(path, _bounded(path, value))
    if kind == "json":
        check_schema(path, value)
        return Constraint(json_schema=value)
    if kind == "regex":
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as exc:
            raise invalid(path, f"{path} is not a valid regular expression: {exc}") from exc
        return Constraint(regex=value)
    if kind == "structural_tag":
        if not isinstance(_loads(path, value), Mapping):
            raise invalid(path, f"{path} must be a JSON object")
        return Constraint(structural_tag=value)
    return Constraint(grammar=value)


def _choices(path: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(c, str) and c for c in value):
        raise invalid(path, f"{path} must be a list of at least 1 non-empty string, got {shown(value)}")
    for item in value:
        check_unicode(path, item)
    _bounded(path, "".join(value))
    return tuple(value)


def _bounded(path: str, text: str) -> str:
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise invalid(path, f"{path} must be at most {MAX_CONSTRAINT_CHARS} characters, got {len(text)}")
    return text


def _loads(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise invalid(path, f"{path} is not valid JSON: {exc}") from exc


def check_schema(path: str, text: str) -> None:
    """Raises unless `text` is a JSON schema that nests at most `MAX_SCHEMA_DEPTH` levels.

    Checked against draft 7, whose meta-schema takes a fifth of the time of 2020-12's and accepts what later drafts add; what an
    engine's grammar compiler cannot do is the engine's to say.
    """
    problem = _schema_problem(text)
    if problem is not None:
        raise invalid(path, f"{path} {problem}")


@functools.lru_cache(maxsize=256)
def _schema_problem(text: str) -> str | None:
    """What is wrong with a schema. Clients send the same few schemas again and again, and a check takes milliseconds."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as exc:
        return f"is not valid JSON: {exc}"
    if not isinstance(schema, dict):
        return f"must be a JSON schema, an object, got {shown(schema)}"
    if nests_deeper(schema, MAX_SCHEMA_DEPTH):
        return f"nests deeper than {MAX_SCHEMA_DEPTH} levels"
    error = next(_META_SCHEMA.iter_errors(schema), None)
    if error is None:
        return None
    where = ".".join(str(p) for p in error.absolute_path)
    return f"is not a valid JSON schema{f' at {where}' if where else ''}: {error.message[:200]}"


_META_SCHEMA = jsonschema.Draft7Validator(jsonschema.Draft7Validator.META_SCHEMA)
