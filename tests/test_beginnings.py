"""How requests begin: names that who sends a request and who makes a prompt of it find alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epd_common.beginnings import FIRST, LAST, MIN_TOKENS, Beginning, beginnings_of
from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES
from epd_common.protocol import Item, Media

LONG = "long " * MIN_TOKENS


def item(digest: str, **fields: Any) -> Item:
    return Item(media=Media(ref=digest), digest=digest, key=f"key of {digest}", **fields)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str, *references: int) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "media_ref", "item": n} for n in references]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, Any], items: tuple[Item, ...] = (), **body: Any) -> list[Beginning]:
    return beginnings_of(CHAT, {"messages": list(messages), **body}, items)


def keys(found: list[Beginning]) -> list[str]:
    return [named.key for named in found]


def test_a_turn_begins_with_all_turns_before_it() -> None:
    turns = [system(LONG), user("what is it?", 0)]
    first = chat(*turns, items=(item("a"),))
    turns += [assistant("a cat"), user("and this?", 1)]
    second = chat(*turns, items=(item("a"), item("b")), temperature=1)
    assert keys(second)[:2] == keys(first) and len(second) == 4
    assert [named.share for named in (first[-1], second[-1])] == [1, 1]
    shares = [named.share for named in second]
    assert shares == sorted(shares)
    assert [named.tokens for named in second] == sorted(named.tokens for named in second)
    # As a service reads it that had it as JSON.
    again = msgspec.json.decode(msgspec.json.encode({"messages": turns}))
    assert keys(beginnings_of(CHAT, again, [item("a"), item("b")])) == keys(second)


def test_whatever_a_template_shows_makes_another_beginning() -> None:
    plain = keys(chat(system(LONG), user("x")))
    for other in (
        chat(system(LONG + "!"), user("x")),
        chat({**system(LONG), "name": "n"}, user("x")),
        chat(user(LONG), user("x")),
        chat(system(LONG), user("x"), tools=[{"type": "function"}]),
        chat(system(LONG), user("x"), chat_template_kwargs={"enable_thinking": False}),
        chat(system(LONG), user("x"), cache_salt="s"),
    ):
        assert not set(plain) & set(keys(other))


def test_items_count_by_their_keys_and_their_rows() -> None:
    large = item("a", width=28 * 100, height=28 * 10)
    (found,) = chat(user("x", 0), items=(large,))
    assert 1000 <= found.tokens < 1100
    other = msgspec.structs.replace(large, key="of another tenant")
    assert keys(chat(user("x", 0), items=(other,))) != [found.key]
    assert keys(chat(user("x", 1), items=(item("b"), large))) == [found.key]


def test_short_beginnings_do_not_count() -> None:
    assert chat(user("short")) == []
    found = chat(system("be kind"), user(LONG), assistant("yes"))
    assert len(found) == 2, "the first message alone is short"
    assert all(named.tokens >= MIN_TOKENS for named in found)


def test_of_a_long_conversation_its_first_and_its_latest_turns_count() -> None:
    turns = [user(LONG) if n % 2 == 0 else assistant(LONG) for n in range(41)]
    found = chat(*turns)
    assert len(found) == FIRST + LAST
    assert keys(found)[:FIRST] == keys(chat(*turns[:FIRST]))
    assert keys(found)[-3] == keys(chat(*turns[:39]))[-1], "the turn before"


def test_a_response_begins_with_its_instructions_and_inputs() -> None:
    body = {"instructions": "be kind", "input": [user(LONG)]}
    more = {**body, "input": [user(LONG), assistant("hi"), user("so?")]}
    first, second = (beginnings_of(RESPONSES, asked, []) for asked in (body, more))
    assert keys(second)[:1] == keys(first) and len(second) == 3
    other = {**body, "instructions": "be short"}
    assert keys(beginnings_of(RESPONSES, other, [])) != keys(first)
    assert len(beginnings_of(RESPONSES, {"input": LONG}, [])) == 1


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [None, 5]}),
        (CHAT, {}),
        (RESPONSES, {}),
        (RESPONSES, {"input": [None], "instructions": 7}),
    ],
)
def test_what_has_no_beginnings(route: str, body: dict[str, Any]) -> None:
    assert beginnings_of(route, body, []) == []
