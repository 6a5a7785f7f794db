"""What both front ends check the same way: sampling fields, model, metadata and the context length. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from coordinator.gateway.fields import Fields, check_unicode, shown
from coordinator.routing.auto import PATHS
from coordinator.routing.config import MAX_SLO_MS
from engine.sampling import Constraint, SamplingParams
from protos.errors import Code, SplitpointError, invalid

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIASES = 4096
MAX_BAD_WORDS = 256
MAX_REQUEST_ID_CHARS = 256
MAX_POOLS = 64
GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling, as in vLLM."""

TRANSPORTS = ("ucx", "grpc")
"""What a client may name where nothing else is configured."""
HEADER_PREFIX = "x-splitpoint-"
PATH_HEADER = "x-splitpoint-path"
POOLS_HEADER = "x-splitpoint-pools"
"""Names of pools with commas between them; workers of no other may serve the request."""
TRANSPORT_HEADER = "x-splitpoint-transport"
DEADLINE_HEADER = "x-splitpoint-deadline-s"
SESSION_HEADER = "x-splitpoint-session"
"""The client's name of a conversation: with `routing.policy = "session_affinity"` its requests go to one worker."""
SLO_TTFT_HEADER = "x-splitpoint-slo-ttft-ms"
SLO_TPOT_HEADER = "x-splitpoint-slo-tpot-ms"
"""What the request is to meet; path `auto` is chosen by it."""
REQUEST_ID_HEADER = "x-request-id"
AUTHORIZATION_HEADER = "authorization"
"""Read where `gateway.auto.keys` has keys; never kept, logged or shown."""
PUBLIC_HEADERS = frozenset(
    {PATH_HEADER, POOLS_HEADER, TRANSPORT_HEADER, DEADLINE_HEADER, SESSION_HEADER, SLO_TTFT_HEADER, SLO_TPOT_HEADER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one gateway with one model accepts."""

    max_model_len: int
    vocab_size: int
    max_choices: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Checked sampling fields. `max_tokens` None: the client left it out. `params.max_tokens` counts only once it is fixed
    with `fit_context`."""

    params: SamplingParams
    max_tokens: int | None
    max_tokens_field: str
    n: int
    stop: tuple[str, ...]
    include_stop_str_in_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What HTTP headers or gRPC metadata say. None, no pools and an empty session: not said."""

    client_request_id: str | None
    path: str | None
    transport: str | None
    deadline_s: float | None
    pools: frozenset[str] = frozenset()
    session: str = ""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    key_name: str = ""
    """Of the configured API key that came with it, "" for another one or none."""


def check_sampling(
    fields: Fields, limits: Limits, *, constraint: Constraint | None, logprobs: int | None, max_tokens_field: str = "max_tokens"
) -> Sampling:
    """Range, type and consistency of every sampling field.

    `logprobs` is already read, because its form differs between the front ends. Raises `SplitpointError` naming the field.
    """
    max_tokens = fields.integer(max_tokens_field, 1, limits.max_model_len)
    min_tokens = fields.integer("min_tokens", 0, limits.max_model_len) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise fields.refuse("min_tokens", f"must be at most {max_tokens_field}={max_tokens}, got {min_tokens}")
    n = fields.integer("n", 1, limits.max_choices) or 1
    temperature = fields.number("temperature", 0, 2)
    if n > 1 and temperature is not None and temperature < GREEDY_BELOW:
        raise fields.refuse("n", f"must be 1 with temperature {temperature:g} (greedy sampling), got {n}")
    params = SamplingParams(
        max_tokens=max_tokens or 1,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=fields.number("top_p", 0, 1, above_low=True),
        top_k=fields.integer("top_k", -1, INT32_MAX),
        min_p=fields.number("min_p", 0, 1),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 0, MAX_REPETITION_PENALTY, above_low=True),
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size=limits.vocab_size),
        ignore_eos=fields.boolean("ignore_eos", False),
        logprobs=logprobs,
        prompt_logprobs=fields.integer("prompt_logprobs", 0, limits.max_logprobs),
        seed=fields.integer("seed", INT64_MIN, INT64_MAX),
        logit_bias=_logit_bias(fields, limits.vocab_size),
        allowed_token_ids=fields.token_ids("allowed_token_ids", vocab_size=limits.vocab_size, at_least=1),
        bad_words=fields.strings("bad_words", most=MAX_BAD_WORDS, max_chars=limits.max_stop_chars),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        constraint=constraint,
    )
    return Sampling(
        params=params,
        max_tokens=max_tokens,
        max_tokens_field=fields.path(max_tokens_field),
        n=n,
        stop=fields.strings("stop", most=limits.max_stop_strings, max_chars=limits.max_stop_chars),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
    )


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`: a fixed one must not give n equal choices. Wraps inside 64 bits."""
    if seed is None:
        return None
    return (seed + index - INT64_MIN) % 2**64 + INT64_MIN


def fit_context(
    prompt_tokens: int,
    sampling: Sampling,
    limits: Limits,
    *,
    default_max_tokens: int | None,
    prompt_field: str,
    lower_bound: bool = False,
) -> int:
    """How many tokens may be generated. Raises `PROMPT_TOO_LONG` naming prompt, wish and limit.

    A wish that was left out is `default_max_tokens`, cut to the room left; None: all the room. `lower_bound`: the prompt has
    `prompt_tokens` or more.
    """
    if prompt_tokens == 0:
        raise invalid(prompt_field, f"{prompt_field} must be at least 1 token, got 0")
    room = limits.max_model_len - prompt_tokens
    if sampling.max_tokens is not None and sampling.max_tokens <= room:
        return sampling.max_tokens
    if sampling.max_tokens is None and room >= 1:
        wish = room if default_max_tokens is None else min(default_max_tokens, room)
        if sampling.params.min_tokens > wish:
            raise invalid("min_tokens", f"min_tokens must be at most {wish}, got {sampling.params.min_tokens}")
        return wish
    wish = sampling.max_tokens or 1
    least = "at least " if lower_bound else ""
    raise SplitpointError(
        Code.PROMPT_TOO_LONG,
        f"{prompt_field} has {least}{prompt_tokens} tokens and {sampling.max_tokens_field} is {wish}: together "
        f"{least}{prompt_tokens + wish}, more than max_model_len {limits.max_model_len}",
        param=prompt_field,
    )


def check_model(requested: str | None, served: str) -> None:
    """Raises `UNKNOWN_MODEL` unless the request leaves the model out or names the one that is served."""
    if requested and requested != served:
        raise SplitpointError(
            Code.UNKNOWN_MODEL, f"model {shown(requested)} does not exist; this gateway serves {served!r}", param="model"
        )


def check_metadata(
    pairs: Iterable[tuple[str, Any]],
    *,
    max_deadline_s: float,
    transports: tuple[str, ...] = TRANSPORTS,
    paths: tuple[str, ...] = PATHS,
    key_names: Mapping[str, str] = MappingProxyType({}),
) -> Metadata:
    """Reads what concerns us of headers or metadata, names in lower case. Other `x-splitpoint-` names are not for clients.
    `transports`, `paths` and `key_names` (by SHA-256) are the configured ones. A name that is given twice is refused: none of its
    values is more right than another."""
    given: dict[str, str] = {}
    authorization: bytes | None = None
    for name, value in pairs:
        if name == AUTHORIZATION_HEADER and key_names:
            if authorization is not None:
                raise invalid(name, f"{name} may be given once")
            authorization = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
        elif name == REQUEST_ID_HEADER or name in PUBLIC_HEADERS:
            if isinstance(value, bytes):
                value = value.decode("latin-1")
            if name in given:
                raise invalid(name, f"{name} may be given once, got {shown(given[name])} and {shown(value)}")
            given[name] = value
        elif name.startswith(HEADER_PREFIX):
            raise SplitpointError(Code.FORBIDDEN_FIELD, f"{name} may not be set by clients", param=name)
    return Metadata(
        client_request_id=_request_id(given.get(REQUEST_ID_HEADER)),
        path=_one_of(given, PATH_HEADER, paths),
        transport=_one_of(given, TRANSPORT_HEADER, transports),
        deadline_s=_positive(given, DEADLINE_HEADER, max_deadline_s),
        pools=_pools(given.get(POOLS_HEADER)),
        session=check_request_id(SESSION_HEADER, given.get(SESSION_HEADER)) or "",
        slo_ttft_s=_seconds(_positive(given, SLO_TTFT_HEADER, MAX_SLO_MS)),
        slo_tpot_s=_seconds(_positive(given, SLO_TPOT_HEADER, MAX_SLO_MS)),
        key_name=_key_name(authorization, key_names) if authorization else "",
    )


def _key_name(authorization: bytes, key_names: Mapping[str, str]) -> str:
    """The name of a bearer key that is configured. Whatever else stands there is somebody else's, and nobody's fault."""
    scheme, _, key = authorization.strip().partition(b" ")
    if scheme.lower() != b"bearer":
        return ""
    return key_names.get(hashlib.sha256(key.strip()).hexdigest(), "")


def check_request_id(path: str, value: str | None) -> str | None:
    """A client's own name of a request or a session: a label of printable ASCII, never a key of ours. "" counts as absent."""
    if not value:
        return None
    if len(value) > MAX_REQUEST_ID_CHARS or not value.isascii() or not value.isprintable():
        raise invalid(path, f"{path} must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return value


def _request_id(value: str | None) -> str | None:
    return check_request_id(REQUEST_ID_HEADER, value)


def _one_of(given: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = given.get(name)
    if value is None or value in allowed:
        return value
    raise invalid(name, f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def _pools(value: str | None) -> frozenset[str]:
    if value is None:
        return frozenset()
    names = [name.strip() for name in value.split(",")]
    if len(names) > MAX_POOLS or not all(names):
        raise invalid(POOLS_HEADER, f"{POOLS_HEADER} must be 1 to {MAX_POOLS} names with commas between them, got {shown(value)}")
    return frozenset(names)


def _positive(given: Mapping[str, str], name: str, most: float) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number <= most:
        raise invalid(name, f"{name} must be a number in (0, {most:.10g}], got {shown(value)}")
    return number


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    value = fields.get("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise fields.refuse("logit_bias", f"must be an object of token ids to numbers, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise fields.refuse("logit_bias", f"must hold at most {MAX_LOGIT_BIASES} entries, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < vocab_size):
            raise fields.refuse("logit_bias", f"must have token ids in [0, {vocab_size - 1}] as keys, got {shown(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise fields.refuse("logit_bias", f"must have numbers in [-100, 100] as values, got {shown(bias)} for {text}")
        biases[int(text)] = float(bias)
    return biases


def check_chat(messages: Any, path: str = "messages") -> list[dict[str, Any]]:
    """Chat messages as the template takes them: role and one text each."""
    if not isinstance(messages, list | tuple) or not messages:
        raise invalid(path, f"{path} must be a list of at least 1 message, got {shown(messages)}")
    return [_message(f"{path}[{i}]", m) for i, m in enumerate(messages)]


_ROLES = ("system", "developer", "user", "assistant")


def _message(path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid(path, f"{path} must be an object, got {shown(message)}")
    role = message.get("role")
    if role in ("tool", "function"):
        raise SplitpointError(
            Code.UNSUPPORTED_FIELD, f"{path}.role {role!r} is not supported: no tool calls", param=f"{path}.role"
        )
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise SplitpointError(Code.UNSUPPORTED_FIELD, f"{path}.{name} is not supported", param=f"{path}.{name}")
    checked = {"role": role, "content": _content(f"{path}.content", message.get("content"))}
    if message.get("name") is not None:
        name = message["name"]
        if not isinstance(name, str):
            raise invalid(f"{path}.name", f"{path}.name must be a string, got {shown(name)}")
        checked["name"] = check_unicode(f"{path}.name", name)
    return checked


def _content(path: str, content: Any) -> str:
    if isinstance(content, str):
        return check_unicode(path, content)
    if not isinstance(content, list | tuple) or not content:
        raise invalid(path, f"{path} must be a string or a list of at least 1 text part, got {shown(content)}")
    texts = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in ("", "text"):
            raise SplitpointError(
                Code.UNSUPPORTED_FIELD, f"{where}.type {shown(kind)} is not supported: text only", param=f"{where}.type"
            )
        if kind != "text":
            raise invalid(where, f'{where} must be an object with type "text", got {shown(part)}')
        if not isinstance(part.get("text"), str):
            raise invalid(f"{where}.text", f"{where}.text must be a string, got {shown(part.get('text'))}")
        texts.append(check_unicode(f"{where}.text", part["text"]))
    return "\n".join(texts)
