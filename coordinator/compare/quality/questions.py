"""The fixed question set: what is asked, and whether an answer is right. Pure but for `load`, which reads the package's file.

Prompts are plain text with worked examples, so that a base model can answer them as well as an instructed one; an answer ends
with its line. Long prompts are a list, one item of which is asked for: at its beginning, in the middle or at its end.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator

FILE = "questions.json"
STOP = "\n"
TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt. `answer` is the text that is right, for a tool call the JSON object as text. `reference` is the whole text to
    be read by both arms: the prompt and the right answer."""

    id: str
    kind: str
    prompt: str
    answer: str
    max_tokens: int

    @property
    def reference(self) -> str:
        return f"{self.prompt} {self.answer}{STOP}"


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """`digest` covers everything that is asked and how it is judged: scores of equal digests are of the same questions.

    `lines` are material for prompts of any length.
    """

    version: int
    digest: str
    questions: tuple[Question, ...]
    lines: tuple[str, ...]
    schemas: dict[str, dict[str, Any]]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(question.kind for question in self.questions))

    def first(self, per_kind: int) -> QuestionSet:
        """At most so many of each kind, always the same ones; all of them where there are no more."""
        chosen: set[str] = set()
        for kind in self.kinds:
            own = [question.id for question in self.questions if question.kind == kind]
            # The file goes from easy to hard and turns through the tools; a digest knows nothing of that.
            chosen.update(sorted(own, key=lambda name: hashlib.sha256(name.encode()).digest())[:per_kind])
        kept = tuple(question for question in self.questions if question.id in chosen)
        return QuestionSet(self.version, self.digest, kept, self.lines, self.schemas)

    def is_right(self, question: Question, text: str) -> bool:
        """Exact match up to the first full stop, comma or line end, but for case; a tool call must be the same JSON object."""
        if question.kind == TOOL_CALL:
            return self.is_well_formed(text) and json.loads(text) == json.loads(question.answer)
        return _plain(text) == _plain(question.answer)

    def is_well_formed(self, text: str) -> bool:
        """A tool call that parses and keeps the schema of the tool it names, whatever its values are."""
        try:
            found = json.loads(text)
        except ValueError:
            return False
        tool = found.get("tool") if isinstance(found, dict) else None
        if not isinstance(tool, str) or tool not in self.schemas:
            return False
        return bool(Draft202012Validator(self.schemas[tool]).is_valid(found))


def _plain(text: str) -> str:
    return re.split(r"[.,\n]", text.strip(), maxsplit=1)[0].strip().casefold()


@functools.cache
def load() -> QuestionSet:
    """The set that comes with the package."""
    return parse((resources.files(__package__) / FILE).read_text(encoding="utf-8"))


def parse(text: str) -> QuestionSet:
    """A set from its JSON.

    Raises:
        ValueError: an id is there twice.
    """
    data = json.loads(text)
    lines = tuple(data["lines"])
    questions = tuple(_question(row, data["kinds"][row["kind"]], lines) for row in data["questions"])
    if len({question.id for question in questions}) != len(questions):
        raise ValueError("two questions have one id")
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return QuestionSet(data["version"], digest, questions, lines, data["tool_schemas"])


def _question(row: dict[str, Any], kind: dict[str, Any], lines: Sequence[str]) -> Question:
    # The head of a tool call holds braces of its own, so nothing is formatted: two names are put in.
    prompt = kind["head"].replace("{ask}", row["ask"]).replace("{lines}", "\n".join(lines[: row.get("lines", 0)]))
    answer = row["answer"] if isinstance(row["answer"], str) else json.dumps(row["answer"])
    return Question(id=row["id"], kind=row["kind"], prompt=prompt, answer=answer, max_tokens=kind["max_tokens"])
