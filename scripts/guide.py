"""The programs and commands that the guides show, made to run against any address.

A fenced `python` block of a guide is a whole program; its first line is a comment with its name, `# ask.py`. Guides are written
for the default ports and the demo's model; `localise` puts another system's in their place.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "docs" / "guide-clients.md"
HTTP, GRPC, ADMIN, MODEL = "127.0.0.1:8000", "127.0.0.1:50051", "127.0.0.1:50052", "smollm2-135m-instruct"
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs(text: str) -> dict[str, str]:
    """The `python` blocks of a document by name, in order. Raises `ValueError` for a block without a name of its own."""
    found: dict[str, str] = {}
    for language, block in _FENCE.findall(text):
        if language == "python":
            named = re.match(r"# (\w+\.py)\b", block)
            if named is None or named[1] in found:
                raise ValueError(f"a python block must begin with a comment that names it, once: {block[:40]!r}")
            found[named[1]] = block
    return found


def console_commands(text: str, program: str) -> list[str]:
    """The commands of `console` blocks that begin with `program`, continuation lines joined."""
    blocks = (block.replace("\\\n", " ") for language, block in _FENCE.findall(text) if language == "console")
    lines = (line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ "))
    return [line for line in lines if line.split()[0] == program]


def localise(text: str, *, http: str, grpc: str, model: str) -> str:
    """`text` with another system's addresses (host:port) and model name."""
    return text.replace(HTTP, http).replace(GRPC, grpc).replace(MODEL, model)
