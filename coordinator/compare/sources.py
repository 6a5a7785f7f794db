"""What a workload is made from: the one specification that `compare` and `workload describe` read, and its shapes per seed.

`read` is the thin shell (files); everything else is pure.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, model_validator

from coordinator.compare import draw, prefixes
from coordinator.compare.shapes import CACHE_BLOCK_TOKENS, Counts, RequestShape, Segment, Shapes, cut, materialise
from coordinator.compare.traces import (
    HASH_BLOCK_TOKENS,
    Prompt,
    Row,
    WorkloadError,
    is_coarse,
    parse_prompts,
    parse_trace,
    spread_batches,
)
from coordinator.compare.workload import SALT_TOKENS, TUNING_SEEDS_FROM, Workload

Encode = Callable[[str], Sequence[int]]


class _Source(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: PositiveInt = Field(200, le=1_000_000, description="Of one seed.")
    first_token: NonNegativeInt = Field(1000, description="Drawn token ids lie from here ...")
    end_token: PositiveInt = Field(20000, description="... to below this; both inside the model's vocabulary.")
    max_input_tokens: PositiveInt | None = Field(None, ge=SALT_TOKENS, description="Longer prompts: see `over`.")
    max_output_tokens: PositiveInt | None = Field(None, description="Longer outputs: see `over`.")
    over: Literal["clip", "drop"] = Field("clip", description="What is done to a request over a limit; both are counted.")

    @model_validator(mode="after")
    def _tokens(self) -> _Source:
        if self.first_token >= self.end_token:
            raise ValueError("first_token must be below end_token")
        return self


class Synthetic(_Source):
    """Lengths and arrivals from distributions; with `prefix`, prompts in groups that share a beginning."""

    kind: Literal["synthetic"]
    input: draw.Lengths
    output: draw.Lengths
    arrivals: draw.Arrivals = draw.Poisson(kind="poisson")
    prefix: prefixes.Prefix | None = None


class Trace(_Source):
    """A file of requests. Time is scaled, never drawn anew; `hash_ids` are honoured unless `prefixes` is off."""

    kind: Literal["trace"]
    file: Path = Field(description="Relative to the specification's own folder.")
    length_scale: float = Field(1.0, gt=0, le=10, description="Every length is multiplied by this, for a smaller machine.")
    output_scale: float | None = Field(
        None,
        gt=0,
        le=10,
        description="That of answers, where it is another: in answers of a few tokens the first gap is most of TPOT.",
    )
    spread: Literal["auto", "on", "off"] = Field("auto", description="Spread batches that coarse time stamps made.")
    prefixes: bool = Field(True, description="Off: every prompt is distinct whatever the trace says.")


class Prompts(_Source):
    """A user's JSON lines. Text needs `tokenizer`, a tokenizer.json or its folder."""

    kind: Literal["prompts"]
    file: Path = Field(description="Relative to the specification's own folder.")
    tokenizer: Path | None = None
    output: draw.Lengths = Field(draw.Fixed(kind="fixed", tokens=128), description="Where a line names no output_tokens.")
    arrivals: draw.Arrivals = Field(draw.Poisson(kind="poisson"), description="Where no line has arrival_s.")


Source = Annotated[Synthetic | Trace | Prompts, Field(discriminator="kind")]
KINDS = frozenset(
    ("synthetic", "trace", "prompts", "fixed", "uniform", "lognormal", "even", "poisson", "gamma", "bursts", "pool", "turns")
)
_ADAPTER: TypeAdapter[Synthetic | Trace | Prompts] = TypeAdapter(Source)


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """A specification and what its files hold; `file_sha256` is of the trace or the prompts, "" where there are none."""

    source: Synthetic | Trace | Prompts
    rows: tuple[Row, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    encode: Encode | None = None
    file_sha256: str = ""

    def shapes(self, seed: int, requests: int | None = None) -> Shapes:
        """One seed's workload, of `requests` instead of the specification's where given. Raises `WorkloadError`."""
        if seed < 0:
            raise WorkloadError(f"seed must be from 0 up, is {seed}")
        count = requests or self.source.requests
        generator = np.random.default_rng(seed)
        match self.source:
            case Synthetic():
                made, counts, notes = _synthetic(self.source, generator, count)
                rate = None
            case Trace():
                made, counts, notes, rate = _trace(self.source, self.rows, seed, count)
            case Prompts():
                made, counts, notes, rate = _prompts(self.source, self.prompts, self.encode, generator, count)
        made, counts = _limit(self.source, made, counts)
        if not made:
            raise WorkloadError("every request is over max_input_tokens or max_output_tokens and was dropped")
        return Shapes(
            seed=seed,
            requests=tuple(made),
            first_token=self.source.first_token,
            end_token=self.source.end_token,
            counts=counts,
            native_rate_per_s=rate,
            notes=tuple(notes),
        )

    def workload(self, seed: int, requests: int) -> Workload:
        """The same with its tokens. Raises `WorkloadError`."""
        return materialise(self.shapes(seed, requests))


def check(spec: Mapping[str, Any]) -> Synthetic | Trace | Prompts:
    """The specification of a mapping. Raises `WorkloadError`, one line per fault, each naming its field."""
    try:
        return _ADAPTER.validate_python(spec)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            # The path names the kind chosen at each union; that is no field.
            parts = [str(part) for part in fault["loc"]]
            where = ".".join(part for part in (*(p for p in parts[:-1] if p not in KINDS), *parts[-1:])) or "kind"
            given = "" if fault["type"] in ("missing", "value_error", "union_tag_not_found") else f", got {fault['input']!r}"
            lines.append(f"{where}: {fault['msg'].removeprefix('Value error, ')}{given}")
        raise WorkloadError("\n".join(lines)) from error


def read(path: Path, sets: Sequence[str] = ()) -> Material:
    """The specification in a TOML file, single values overridden by `path=value` (read as TOML), and the files it names.

    Raises `WorkloadError`.
    """
    spec = _toml(_text(path), str(path))
    for item in sets:
        name, equals, value = item.partition("=")
        if not equals:
            raise WorkloadError(f"--set {item}: write path=value, for example requests=100")
        try:
            over = tomllib.loads(f"{name} = {value}")
        except tomllib.TOMLDecodeError:
            over = _toml(f'{name} = "{value}"', f"--set {item}")
        spec = _merged(spec, over)
    source = check(spec)
    if isinstance(source, Synthetic):
        return Material(source)
    file = path.parent / source.file
    text = _text(file)
    file_sha256 = hashlib.sha256(text.encode()).hexdigest()
    try:
        if isinstance(source, Trace):
            return Material(source, rows=tuple(parse_trace(text)), file_sha256=file_sha256)
        found = tuple(parse_prompts(text))
    except WorkloadError as error:
        raise WorkloadError(f"{file}: {error}") from error
    encode = None
    if any(prompt.text is not None for prompt in found):
        if source.tokenizer is None:
            raise WorkloadError("tokenizer: is needed, the file has prompts as text")
        encode = _tokenizer(path.parent / source.tokenizer)
    return Material(source, prompts=found, encode=encode, file_sha256=file_sha256)


Made = list[RequestShape]


def _synthetic(source: Synthetic, generator: np.random.Generator, count: int) -> tuple[Made, Counts, list[str]]:
    waits = draw.gaps(source.arrivals, generator, count).tolist()
    inputs, input_clipped = draw.lengths(source.input, generator, count)
    outputs, output_clipped = draw.lengths(source.output, generator, count)
    lengthened = int(np.count_nonzero(inputs < SALT_TOKENS))
    inputs = np.maximum(inputs, SALT_TOKENS)
    pairs = zip(waits, inputs.tolist(), outputs.tolist(), strict=True)
    made = [RequestShape(gap, tokens, output) for gap, tokens, output in pairs]
    counts = Counts(input_clipped=input_clipped, output_clipped=output_clipped, input_lengthened=lengthened)
    if source.prefix is None:
        return made, counts, []
    return prefixes.assign(source.prefix, made, generator), counts, [prefixes.note(source.prefix)]


def _trace(source: Trace, rows: Sequence[Row], seed: int, count: int) -> tuple[Made, Counts, list[str], float | None]:
    notes = []
    arrivals = np.array([row.arrival_s for row in rows])
    spread = 0
    if source.spread == "on" or (source.spread == "auto" and is_coarse(arrivals.tolist())):
        # A fixed seed: the same trace has the same arrivals under every seed of a comparison.
        arrivals, spread = spread_batches(arrivals.tolist(), np.random.default_rng(0))
        notes.append("time stamps are coarse: each batch is spread over the usual distance of batches, with a fixed seed")
    if count >= len(rows):
        begin, count = 0, len(rows)
        notes.append(f"all {count} rows are sent: every seed sends the same lengths")
    else:
        begin = _window(seed, len(rows) // count) * count
        notes.append(f"rows {begin + 1} to {begin + count} of {len(rows)}")
    before = arrivals[begin - 1] if begin else arrivals[0]
    waits = np.diff(arrivals[begin : begin + count], prepend=before)
    lasted_s = float(waits.sum())
    if lasted_s <= 0:
        raise WorkloadError(f"{count} rows from row {begin + 1} on arrive all at once: spread them (spread = 'on') or send more")
    # The window's own rate, so that an offered rate is what is offered.
    waits = waits * (count / lasted_s)
    made, lengthened = [], 0
    output_scale = source.length_scale if source.output_scale is None else source.output_scale
    for wait, row in zip(waits.tolist(), rows[begin : begin + count], strict=True):
        tokens = max(SALT_TOKENS, round(row.input_tokens * source.length_scale))
        lengthened += row.input_tokens * source.length_scale < SALT_TOKENS - 0.5
        shared = _hash_segments(row, source.length_scale, tokens) if source.prefixes else ()
        made.append(RequestShape(wait, tokens, max(1, round(row.output_tokens * output_scale)), shared))
    counts = Counts(rows=len(rows), input_lengthened=lengthened, spread=spread)
    return made, counts, notes, count / lasted_s


def windows(material: Material, requests: int) -> int | None:
    """How many seeds send rows of their own, `requests` each; None where requests are drawn anew for every seed."""
    return max(1, len(material.rows) // requests) if isinstance(material.source, Trace) else None


def _window(seed: int, count: int) -> int:
    """Which of `count` windows without a common row a seed sends: those that are measured from the beginning of a fixed shuffle,
    those that only tuning uses, and 0, from its end."""
    place = seed - 1 if 0 < seed < TUNING_SEEDS_FROM else -1 - max(0, seed - TUNING_SEEDS_FROM)
    return int(np.random.default_rng(0).permutation(count)[place % count])


def _hash_segments(row: Row, scale: float, tokens: int) -> tuple[Segment, ...]:
    bounds = [min(tokens, round(HASH_BLOCK_TOKENS * scale * i)) for i in range(len(row.hash_ids))] + [tokens]
    pairs = zip(row.hash_ids, bounds, bounds[1:], strict=False)
    return tuple(Segment(f"hash/{name}", high - low) for name, low, high in pairs if high > low)


def _prompts(
    source: Prompts, prompts: Sequence[Prompt], encode: Encode | None, generator: np.random.Generator, count: int
) -> tuple[Made, Counts, list[str], float | None]:
    order = np.concatenate([generator.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))])[:count].tolist()
    outputs, clipped = draw.lengths(source.output, generator, count)
    rate = None
    if prompts[0].arrival_s is not None:
        if count > len(prompts):
            raise WorkloadError(f"requests: at most the file's {len(prompts)} lines, whose arrival_s cannot repeat; got {count}")
        order = sorted(order, key=lambda i: prompts[i].arrival_s or 0.0)
        arrivals = np.array([prompts[i].arrival_s for i in order], dtype=float)
        waits = np.diff(arrivals, prepend=arrivals[0])
        lasted_s = float(waits.sum())
        if lasted_s <= 0:
            raise WorkloadError("arrival_s: all requests arrive at once; leave it out to have arrivals drawn")
        rate = count / lasted_s
        waits = waits * rate
    else:
        waits = draw.gaps(source.arrivals, generator, count)
    made = []
    for wait, index, drawn in zip(waits.tolist(), order, outputs.tolist(), strict=True):
        prompt = prompts[index]
        ids = prompt.token_ids if prompt.token_ids is not None else _encoded(prompt, encode)
        # Room for the salt, then the words; the whole is what the service reads.
        tokens = SALT_TOKENS + len(ids)
        made.append(RequestShape(wait, tokens, prompt.output_tokens or drawn, _content_segments(ids), ids))
    repeated = max(0, count - len(prompts))
    notes = [f"{repeated} of {count} requests repeat a prompt: the file has {len(prompts)}"] if repeated else []
    return made, Counts(rows=len(prompts), output_clipped=clipped, repeated=repeated), notes, rate


def _encoded(prompt: Prompt, encode: Encode | None) -> tuple[int, ...]:
    if encode is None or prompt.text is None:
        raise WorkloadError("tokenizer: is needed, the file has prompts as text")
    ids = tuple(encode(prompt.text))
    if not ids:
        raise WorkloadError(f"the tokenizer makes no token of {prompt.text[:40]!r}")
    return ids


def _content_segments(ids: tuple[int, ...]) -> tuple[Segment, ...]:
    """Blocks as a prefix cache sees them, the salt's room in the first; every prompt begins with the same one-token name."""
    whole = (ids[i : i + CACHE_BLOCK_TOKENS] for i in range(0, len(ids), CACHE_BLOCK_TOKENS))
    return (Segment("prompts", SALT_TOKENS), *(Segment(f"text/{','.join(map(str, part))}", len(part)) for part in whole))


def _limit(source: _Source, made: Made, counts: Counts) -> tuple[Made, Counts]:
    kept, dropped, inputs, outputs = [], 0, 0, 0
    waited = 0.0
    for request in made:
        long_input = source.max_input_tokens is not None and request.input_tokens > source.max_input_tokens
        long_output = source.max_output_tokens is not None and request.output_tokens > source.max_output_tokens
        if (long_input or long_output) and source.over == "drop":
            dropped += 1
            waited += request.gap  # The others keep their arrival times.
            continue
        if long_input:
            inputs += 1
            request = _shorter(request, source.max_input_tokens or 0)
        if long_output:
            outputs += 1
            request = dataclasses.replace(request, output_tokens=source.max_output_tokens or 0)
        kept.append(dataclasses.replace(request, gap=request.gap + waited))
        waited = 0.0
    if dropped and kept:
        # Fewer requests in the same time: unit rate again.
        mean = sum(request.gap for request in kept) / sum(request.gap for request in made) * len(made) / len(kept)
        kept = [dataclasses.replace(request, gap=request.gap / mean) for request in kept]
    return kept, dataclasses.replace(
        counts,
        dropped=counts.dropped + dropped,
        input_clipped=counts.input_clipped + inputs,
        output_clipped=counts.output_clipped + outputs,
    )


def _shorter(request: RequestShape, tokens: int) -> RequestShape:
    if request.token_ids is None:
        return cut(request, tokens)
    ids = request.token_ids[: tokens - SALT_TOKENS]
    return dataclasses.replace(request, input_tokens=SALT_TOKENS + len(ids), shared=_content_segments(ids), token_ids=ids)


def _tokenizer(path: Path) -> Encode:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    _text(file)
    found = Tokenizer.from_file(str(file))
    return lambda text: found.encode(text).ids


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{where}: not TOML: {error}") from error


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
