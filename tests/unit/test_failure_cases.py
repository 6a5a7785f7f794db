"""docs/failure-cases.md: every known failure of other systems stands there once, with tests that exist or an honest word.

Tests are looked up in the files' syntax trees; nothing is imported. What a row claims is for a reader to judge; that its tests
are there, that none is missing, and how many are excluded, is judged here.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "failure-cases.md"
CASES: dict[str, list[str]] = json.loads(Path(__file__).with_name("failure_cases.json").read_text())
SOURCE = ROOT.parent / "shared" / "failure-cases.jsonl"
"""Where the cases come from, on machines that have it."""
OURS = (
    "abort-leak",
    "silent-corruption",
    "block-math",
    "stale-completion",
    "stuck-remote-kv",
    "topology-mismatch",
    "transport-ucx",
    "identity",
    "preemption",
    "router",
    "drain-scale",
    "peer-death",
    "silent-fallback",
    "network-addressing",
    "ray",
)
"""Categories of which every case that can happen is a named test."""
MAX_EXCLUDED = 0.25
OPEN, CANNOT = "open:", "Cannot happen:"


@dataclass(frozen=True)
class Row:
    """One line of a table: a case, what went wrong elsewhere, how it is here, and the tests."""

    case: str
    category: str
    here: str
    tests: tuple[str, ...]

    @property
    def excluded(self) -> bool:
        return self.here.startswith(CANNOT)

    @property
    def open(self) -> bool:
        return OPEN in self.here


def rows(text: str) -> list[Row]:
    """Every row of every table; a table's category is the heading above it."""
    found, category = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            category = line[3:].split()[0]
        if line.startswith("| PDB-"):
            case, _, here, tests = (cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" | "))
            found.append(Row(case, category, here, tuple(re.findall(r"`([^`]+)`", tests))))
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Node ids of a test file, without the file: functions, `Class::method`, and state machines' `Name` (`Name = X.TestCase`)."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=outer, body=body):
                names |= {f"{outer}::{inner.name}" for inner in body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute(attr="TestCase")):
                names.add(name)
    return frozenset(name for name in names if name.split("::")[-1].startswith(("test_", "Test")))


def missing(test: str) -> str:
    """Why this node id does not name a test; "" when it does."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not file.startswith("tests/") or not path.is_file():
        return f"{test}: no such file"
    return "" if name in names_in(path) else f"{test}: no such test"


ROWS = rows(PAGE.read_text())


def test_every_case_is_listed_once_under_its_category() -> None:
    assert Counter(row.case for row in ROWS) == Counter(case for cases in CASES.values() for case in cases)
    listed: dict[str, list[str]] = {}
    for row in ROWS:
        listed.setdefault(row.category, []).append(row.case)
    assert listed == CASES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_every_named_test_exists(row: Row) -> None:
    assert [fault for fault in map(missing, row.tests) if fault] == []
    assert row.tests or row.open, "a row has a test, or says that it has none"
    assert row.here, "a row says how it is here"


def test_our_categories_are_covered() -> None:
    ours = [row for row in ROWS if row.category in OURS]
    assert [row.case for row in ours if row.open] == [], "none of these may stay without a test"
    for category in OURS:
        excluded = [row.case for row in ours if row.category == category and row.excluded]
        assert len(excluded) <= MAX_EXCLUDED * sum(row.category == category for row in ours), excluded


def test_the_page_says_how_many() -> None:
    """Its first lines give the numbers, which are counted here."""
    text, ours = PAGE.read_text(), [row for row in ROWS if row.category in OURS]
    counted = (
        f"{len(ROWS)} cases. Of the {len(ours)} in the categories of KV transfer and of serving, "
        f"{sum(not row.excluded for row in ours)} are tests and {sum(row.excluded for row in ours)} cannot happen here; "
        f"of the other {len(ROWS) - len(ours)}, {sum(row.open for row in ROWS)} are open, in whole or in part."
    )
    assert counted in " ".join(text.split()), counted


def test_the_list_is_the_sources() -> None:
    if not SOURCE.is_file():
        pytest.skip("the source of the cases is not on this machine")
    cases: dict[str, list[str]] = {}
    for line in SOURCE.read_text().splitlines():
        case = json.loads(line)
        cases.setdefault(case["category"], []).append(case["id"])
    assert cases == CASES


@pytest.mark.parametrize(
    ("test", "fault"),
    [
        ("tests/unit/test_failure_cases.py::test_the_checker_itself", ""),
        ("tests/property/test_lease.py::TestMessages", ""),
        ("tests/unit/test_reconcile.py::TestDrain::test_waits_while_something_is_left", ""),
        ("tests/unit/test_failure_cases.py::test_no_such_test", "no such test"),
        ("tests/unit/test_failure_cases.py::missing", "no such test"),
        ("tests/unit/no_such_file.py::test_x", "no such file"),
        ("docs/failure-cases.md::test_x", "no such file"),
    ],
)
def test_the_checker_itself(test: str, fault: str) -> None:
    found = missing(test)
    assert (found == "") is (fault == "")
    assert fault in found
