"""What every plan refuses, and the number formats it knows. Pure."""

from __future__ import annotations

import math
import re
from fractions import Fraction

FORMAT_BYTES: dict[str, Fraction] = {
    "fp32": Fraction(4),
    "bf16": Fraction(2),
    "fp16": Fraction(2),
    "fp8": Fraction(1),
    "int8": Fraction(1),
    "fp4": Fraction(1, 2),
    "int4": Fraction(1, 2),
}
"""Bytes per element. Scales of quantised formats are not counted: below 4 % at one 16-bit scale per 64 elements."""

TORCH_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""How a model's `config.json` spells them."""


class RefusedValueError(ValueError):
    """A value that no plan can be made from. `option` is its name on the command line; the text says the limit."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


MOST = 10**18
"""Beyond this a number was mistyped."""


def at_least(option: str, value: float, least: float) -> None:
    """Raises `RefusedValueError` unless `value` lies between `least` and `MOST`."""
    if not value <= MOST:
        raise RefusedValueError(option, f"must be at most {MOST:.0e}")
    if value < least:
        raise RefusedValueError(option, f"must be at least {least:g}, got {value:g}")


def positive(option: str, value: float) -> None:
    """Raises `RefusedValueError` unless `value` is above 0 and at most `MOST`."""
    if value > MOST:
        raise RefusedValueError(option, f"must be at most {MOST:.0e}")
    if not (math.isfinite(value) and value > 0):
        raise RefusedValueError(option, f"must be above 0, got {value:g}")


def share(option: str, value: float) -> None:
    """Raises `RefusedValueError` unless `value` is in (0, 1]."""
    if not 0 < value <= 1:
        raise RefusedValueError(option, f"must be above 0 and at most 1, got {value:g}")


def format_bytes(option: str, name: str) -> Fraction:
    """Bytes per element of a format. Raises `RefusedValueError` with the formats known."""
    if name not in FORMAT_BYTES:
        raise RefusedValueError(option, f"unknown format {name!r}; known: {', '.join(FORMAT_BYTES)}")
    return FORMAT_BYTES[name]


def parse_count(option: str, text: str) -> int:
    """`"500B"`, `"1.5T"`, `"135M"`, `"8e9"` as a whole number, powers of 1000. Raises `RefusedValueError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise RefusedValueError(option, f"{text!r} is not a count such as 500B, 1.5T or 8e9")
    value = Fraction(match[1]) * 1000 ** " KMBT".index(match[2].upper() or " ")
    if value.denominator != 1 or value < 1:
        raise RefusedValueError(option, f"{text!r} is not a whole number from 1 up")
    return int(value)
