"""Every field case of docs/field-cases.md has a test that is named after its number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field-cases.md"
CASES = range(1, 40)

_NAME = re.compile(r"test_fc(\d{2})_\w+")
_ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)


def names() -> Iterator[tuple[int, str]]:
    """Numbers and names of the tests of field cases."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(), path.name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                found := _NAME.fullmatch(node.name)
            ):
                yield int(found[1]), node.name


def test_every_case_has_a_test() -> None:
    found = {number for number, _ in names()}
    assert sorted(set(CASES) - found) == [], "field cases without a test"
    assert sorted(found - set(CASES)) == [], "numbers that are no field case's"


def test_the_page_names_every_case_and_tests_that_exist() -> None:
    rows = {int(number): cells for number, cells in _ROW.findall(PAGE.read_text())}
    assert sorted(rows) == list(CASES)
    known = {name for _, name in names()}
    for number, cells in rows.items():
        named = re.findall(r"`(test_\w+)`", cells.rpartition(" | ")[2])
        assert named, f"case {number} names no test"
        assert sorted(set(named) - known) == [], f"case {number} names tests that do not exist"
        assert any(name.startswith(f"test_fc{number:02}_") for name in named), number
