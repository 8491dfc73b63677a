"""What a simulated engine says: digests of all that it was shown and told.

So an answer is right only if each embedding was that of its media, whole, and in its place; and a client
that knows its own request knows the right answer (:func:`expected_answer`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES
from epd_sim.embedding import signature
from epd_sim.parameters import Parameters, read_parameters
from epd_sim.prompts import MediaPart, Prompt, chat_prompt, completion_prompts, responses_prompt

OWN_WORDS = 16
"""Words of an answer that ends by itself, beside one for each item. A word is a token."""

_HEX = 8
"""Characters of a word, in hexadecimal."""


def answer_words(evidence: Sequence[str | bytes], count: int, *, choice: int = 0) -> list[str]:
    """The first ``count`` words of an answer.

    The first word is a digest of everything, in its order; then comes one for each item, which tells what was
    wrong with the first; then one for the text; the rest follows from the first.

    Args:
        evidence: Texts, and in the place of each item its signature.
    """
    whole = hashlib.sha256()
    for piece in evidence:
        kind, raw = (b"t", piece.encode()) if isinstance(piece, str) else (b"i", piece)
        whole.update(kind + len(raw).to_bytes(8, "big") + raw)
    whole.update(choice.to_bytes(8, "big"))
    text = "".join(piece for piece in evidence if isinstance(piece, str))
    words = [whole.hexdigest(), *(piece.hex() for piece in evidence if isinstance(piece, bytes))]
    words.append(hashlib.sha256(text.encode()).hexdigest())
    seed = whole.digest()
    words += [
        hashlib.sha256(seed + number.to_bytes(8, "big")).hexdigest()
        for number in range(count - len(words))
    ]
    return [word[:_HEX] for word in words[:count]]


def token_of(word: str) -> int:
    """A word's token id."""
    return int(word, 16)


def word_of(token: int) -> str:
    """The word of a token id."""
    return f"{token:0{_HEX}x}"


def answer_length(items: int, parameters: Parameters, room: int) -> tuple[int, str]:
    """Tokens of an answer, and its ``finish_reason``.

    Args:
        items: Of the prompt.
        room: Tokens between the prompt's end and the longest sequence that the model takes.
    """
    limit = min(parameters.limit or room, room)
    own = max(items + OWN_WORDS, parameters.min_tokens)
    if parameters.ignore_eos or own > limit:
        return limit, "length"
    return own, "stop"


def expected_answer(body: dict[str, Any], media: Sequence[bytes] = (), *, choice: int = 0) -> str:
    """The right answer to a request, for who knows its media.

    Args:
        body: The OpenAI body of a chat, a completion or a response, as the client sends it.
        media: The bytes of each of its media parts, in their order.
        choice: Which of the answer's choices.

    Raises:
        ValueError: media and parts are not as many.
    """
    route = CHAT if "messages" in body else RESPONSES if "input" in body else COMPLETIONS
    parameters = read_parameters(route, body)
    prompts = prompts_of(route, body)
    evidence: list[str | bytes] = []
    left = list(media)
    for piece in prompts[choice // parameters.n]:
        if isinstance(piece, MediaPart):
            if not left:
                raise ValueError(f"the body has more media parts than the {len(media)} given")
            evidence.append(signature(left.pop(0)))
        else:
            evidence.append(piece.text)
    if left:
        raise ValueError(f"{len(media)} media were given, {len(left)} more than the body has parts")
    count, _ = answer_length(len(media), parameters, room=_ENDLESS)
    return " ".join(answer_words(evidence, count, choice=choice % parameters.n))


def prompts_of(route: str, body: dict[str, Any]) -> list[Prompt]:
    """The prompts of a body.

    Raises:
        ValueError: its ``prompt`` is none.
    """
    if route == CHAT:
        return [chat_prompt(body["messages"])]
    if route == RESPONSES:
        return [responses_prompt(body)]
    return completion_prompts(body.get("prompt"))


_ENDLESS = 1 << 30
