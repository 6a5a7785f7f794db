"""Reading single fields of a public request. Pure. Every refusal names the field and its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from protos.errors import SplitpointError, invalid

MAX_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """`value` as it may stand in an error message: short, never a whole prompt."""
    if isinstance(value, str) and len(value) > MAX_SHOWN_CHARS:
        return json.dumps(value[:MAX_SHOWN_CHARS]) + "..."
    if isinstance(value, list | tuple | dict) and len(value) > MAX_SHOWN_CHARS:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def nests_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects in `value` nest more than `limit` levels."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if not level:
            return False
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return True


class Fields:
    """The fields of one request, by name. An absent field and a null one are the same: the default applies.

    `prefix` stands before the name in messages, for fields of a nested message.
    """

    __slots__ = ("_prefix", "_values")

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is given and not null."""
        return self._values.get(name) is not None

    def path(self, name: str) -> str:
        """The field's whole name."""
        return self._prefix + name

    def refuse(self, name: str, problem: str) -> SplitpointError:
        """An error about `name`; `problem` follows the name in the message."""
        return invalid(self.path(name), f"{self.path(name)} {problem}")

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]."""
        value = self._values.get(name)
        if value is None:
            return None
        limits = f"must be an integer in [{low}, {high}]"
        if isinstance(value, bool) or not isinstance(value, int):
            if not (isinstance(value, float) and value.is_integer()):
                raise self.refuse(name, f"{limits}, got {shown(value)}")
            value = int(value)
        if not low <= value <= high:
            raise self.refuse(name, f"{limits}, got {shown(value)}")
        return value

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """A finite number in [low, high], or in (low, high] with `above_low`."""
        value = self._values.get(name)
        if value is None:
            return None
        limits = f"must be a number in {'(' if above_low else '['}{low:g}, {high:g}]"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"{limits}, got {shown(value)}")
        if not low <= value <= high or (above_low and value == low) or not math.isfinite(value):
            raise self.refuse(name, f"{limits}, got {shown(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, got {shown(value)}")
        return value

    def text(self, name: str) -> str | None:
        """A string of valid Unicode."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.refuse(name, f"must be a string, got {shown(value)}")
        return check_unicode(self.path(name), value)

    def strings(self, name: str, *, most: int, max_chars: int) -> tuple[str, ...]:
        """One string or a list of at most `most`, each of 1 to `max_chars` characters."""
        value = self._values.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(s, str) for s in items):
            raise self.refuse(name, f"must be a string or a list of strings, got {shown(value)}")
        if len(items) > most:
            raise self.refuse(name, f"must hold at most {most} strings, got {len(items)}")
        for item in items:
            if not 1 <= len(item) <= max_chars:
                raise self.refuse(name, f"must hold strings of 1 to {max_chars} characters, got one of {len(item)}")
            check_unicode(self.path(name), item)
        return tuple(dict.fromkeys(items))

    def token_ids(self, name: str, *, vocab_size: int, at_least: int = 0) -> tuple[int, ...]:
        """A list of token ids below `vocab_size`."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.refuse(name, f"must be a list of token ids, got {shown(value)}")
        if len(value) < at_least:
            raise self.refuse(name, f"must hold at least {at_least} token id, got {len(value)}")
        check_token_ids(self.path(name), value, vocab_size)
        return tuple(dict.fromkeys(value))


def check_token_ids(path: str, ids: list[Any] | tuple[Any, ...], vocab_size: int) -> None:
    """Raises unless every item is an integer in [0, vocab_size - 1]."""
    for position, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise invalid(
                path,
                f"{path} must hold token ids, integers in [0, {vocab_size - 1}], got {shown(token_id)} at position {position}",
            )


def check_unicode(path: str, text: str) -> str:
    """`text`, unless it holds lone surrogates, which no tokenizer can encode."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as exc:
            raise invalid(path, f"{path} is not valid Unicode: lone surrogate at character {exc.start}") from exc
    return text
