"""The Chinese README says what the English one says: same parts, same commands, same links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```.*?^```$", text, re.M | re.S)


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def links(text: str) -> list[str]:
    """Targets in their order; the two READMEs' links to each other count as one."""
    found = re.findall(r"\]\(([^)]+)\)", prose(text))
    return ["other" if target in (ENGLISH, CHINESE) else target for target in found]


def inline_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", prose(text)))


def shape(text: str) -> list[str]:
    """Headings by their level, points of lists, and rows of tables with their number of cells."""
    found = []
    for line in prose(text).splitlines():
        if heading := re.match(r"#+ ", line):
            found.append(heading[0])
        elif line.startswith("* "):
            found.append("*")
        elif line.startswith("|"):
            found.append("|" * line.count("|"))
    return found


def test_both_have_the_same_commands() -> None:
    assert code_blocks(read(ENGLISH))
    assert code_blocks(read(CHINESE)) == code_blocks(read(ENGLISH))


def test_both_lead_to_the_same_places_and_to_each_other() -> None:
    assert links(read(CHINESE)) == links(read(ENGLISH))
    assert f"]({CHINESE})" in read(ENGLISH) and f"]({ENGLISH})" in read(CHINESE)
    for target in links(read(ENGLISH)):
        if target != "other" and "://" not in target:
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_both_have_the_same_parts() -> None:
    assert shape(read(CHINESE)) == shape(read(ENGLISH))


def test_both_name_the_same_things() -> None:
    assert inline_code(read(CHINESE)) == inline_code(read(ENGLISH))


def test_both_name_the_same_versions() -> None:
    def numbers(name: str) -> list[str]:
        return sorted(re.findall(r"\d+\.\d+", prose(read(name))))

    assert numbers(CHINESE) == numbers(ENGLISH)


def test_it_is_in_chinese() -> None:
    written = [paragraph for paragraph in prose(read(CHINESE)).split("\n\n") if len(paragraph) > 80]
    assert len(written) > 5
    for paragraph in written:
        assert re.search(r"[\u4e00-\u9fff]", paragraph), paragraph
