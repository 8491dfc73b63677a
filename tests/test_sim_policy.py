"""What simulated engines decide and compute, without time or I/O: steps, sizes, durations, answers."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from PIL import Image
from PIL.ExifTags import Base

from epd_common.errors import BadRequestError
from epd_sim.answers import answer_words, expected_answer
from epd_sim.device import PunctualSleep
from epd_sim.embedding import signature
from epd_sim.parameters import RefusedError, read_parameters
from epd_sim.profiles import PROFILES, UnknownProfileError, profile_named
from epd_sim.prompts import Text, completion_prompts
from epd_sim.scheduler import Scheduler, Sequence, Span, Step
from epd_sim.sizing import size_of

H100 = profile_named("qwen2.5-vl-7b-h100")


def everything(key: str) -> bool:
    return True


def here(*keys: str) -> Callable[[str], bool]:
    return lambda key: key in keys


def scheduler(*sequences: Sequence, slots: int = 4, budget: int = 100) -> Scheduler:
    made = Scheduler(max_num_seqs=slots, budget=budget)
    for sequence in sequences:
        made.add(sequence)
    return made


def steps(made: Scheduler, is_here: Callable[[str], bool] = everything) -> list[tuple[int, int]]:
    """Tokens prefilled and sequences decoding in each step, until there is nothing to compute."""
    seen = []
    while not (step := made.schedule(is_here)).empty:
        made.advance(step)
        seen.append((step.prefill_tokens, step.decoding))
    return seen


# -- the scheduler ---------------------------------------------------------------------------------


def test_a_long_prompt_is_prefilled_in_chunks_and_its_last_one_gives_the_first_token() -> None:
    assert steps(scheduler(Sequence(250, 3))) == [(100, 0), (100, 0), (50, 0), (0, 1), (0, 1)]


def test_answers_go_on_while_another_prompt_is_prefilled() -> None:
    first, second = Sequence(10, 5), Sequence(150, 1)
    made = scheduler(first)
    made.advance(made.schedule(everything))
    made.add(second)
    assert steps(made) == [(99, 1), (51, 1), (0, 1), (0, 1)]


def test_prompts_share_the_budget_of_a_step() -> None:
    step = scheduler(Sequence(60, 1), Sequence(60, 1), Sequence(60, 1)).schedule(everything)
    assert [tokens for _, tokens in step.prefill] == [60, 40]


def test_a_lower_priority_is_served_first_and_equal_ones_as_they_came() -> None:
    late, early, urgent = Sequence(80, 1), Sequence(80, 1), Sequence(80, 1, priority=-1)
    made = scheduler(early, late, urgent)
    assert [sequence for sequence, _ in made.schedule(everything).prefill] == [urgent, early]
    assert made.waiting == [late]


def test_no_more_run_than_there_are_slots() -> None:
    made = scheduler(*(Sequence(10, 2) for _ in range(5)), slots=2)
    made.advance(made.schedule(everything))
    assert (len(made.running), len(made.waiting)) == (2, 3)
    assert steps(made) == [(0, 2), (20, 0), (0, 2), (10, 0), (0, 1)]


def test_each_choice_takes_a_slot_and_is_not_overtaken_for_ever() -> None:
    three, one = Sequence(10, 2, choices=3), Sequence(10, 2)
    made = scheduler(Sequence(10, 3), Sequence(10, 2), three, one)
    made.advance(made.schedule(everything))
    assert made.waiting == [three, one]
    assert steps(made) == [(0, 2), (10, 1), (10, 3), (0, 1)]


def test_prefill_goes_up_to_the_first_item_that_is_missing() -> None:
    spans = (Span("a", 10, 20), Span("b", 40, 20))
    made = scheduler(Sequence(70, 1, spans))
    assert steps(made, here("b")) == [(10, 0)]
    assert steps(made, here("a")) == [(30, 0)]
    assert steps(made, here("b")) == [(30, 0)], "what is prefilled needs its embedding no more"


def test_one_that_can_prefill_nothing_takes_no_slot_and_stops_nobody() -> None:
    blocked, free = Sequence(20, 1, (Span("a", 0, 10),)), Sequence(20, 1)
    made = scheduler(blocked, free, slots=1)
    step = made.schedule(here())
    assert step == Step(((free, 20),), ())
    assert made.waiting == [blocked]


def test_items_begin_in_the_step_that_comes_to_them() -> None:
    sequence = Sequence(70, 1, (Span("a", 10, 20), Span("b", 40, 20)))
    assert [sequence.spans_begun(tokens) for tokens in (10, 11, 70)] == [(), (0,), (0, 1)]
    sequence.computed = 11
    assert sequence.spans_begun(59) == (1,)


def test_a_removed_sequence_grows_no_more() -> None:
    sequence = Sequence(10, 2)
    made = scheduler(sequence)
    step = made.schedule(everything)
    made.remove(sequence)
    assert made.advance(step) == []
    assert made.schedule(everything).empty


# -- sizes -----------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def grid(data: bytes, patch: int = 14, max_rows: int = 16384, **args: int) -> tuple[int, list[int]]:
    size = size_of("image", data, args, patch=patch, max_rows=max_rows)
    return size.rows, size.metadata["image_grid_thw"]


@pytest.mark.parametrize(
    ("width", "height", "rows"), [(640, 640, 529), (1280, 720, 1196), (1920, 1080, 2691)]
)
def test_rows_are_those_published_for_qwen2_5_vl(width: int, height: int, rows: int) -> None:
    assert grid(png(width, height))[0] == rows


def test_a_1080p_embedding_of_qwen3_vl_has_67_mb() -> None:
    profile = profile_named("qwen3-vl-8b-h20")
    rows, _ = grid(png(1920, 1080), patch=profile.patch)
    assert round(rows * profile.width * 2 / 1e6) == 67


def test_pictures_outside_of_the_bounds_are_scaled() -> None:
    assert grid(png(8, 8)) == (4, [1, 4, 4])
    assert grid(png(1920, 1080), max_rows=640) == (594, [1, 36, 66])
    assert grid(png(280, 280), max_pixels=28 * 28 * 16) == (16, [1, 8, 8])
    assert grid(png(28, 28), min_pixels=28 * 28 * 16) == (16, [1, 8, 8])


def test_a_picture_that_lies_on_its_side_is_turned() -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (280, 140)).save(buffer, "JPEG", exif=exif)
    assert grid(buffer.getvalue())[1] == [1, 20, 10]


@pytest.mark.parametrize("data", [b"no picture", png(8, 8)[:20], png(1, 300)])
def test_what_no_model_takes_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequestError):
        grid(data)


def test_videos_and_recordings_have_rows_by_their_bytes() -> None:
    video = size_of("video", bytes(40_000), {}, patch=14, max_rows=1)
    assert (video.rows, video.metadata) == (192, {"video_grid_thw": [3, 16, 16]})
    audio = size_of("audio", bytes(32_000), {}, patch=14, max_rows=1)  # a second
    assert (audio.rows, audio.metadata) == (26, {"audio_num_tokens": 26})


# -- time ------------------------------------------------------------------------------------------


def test_a_published_time_is_that_of_its_profile() -> None:
    assert H100.encode_s([2691]) == pytest.approx(0.167)
    chunks = [2048, 2718 - 2048]
    assert sum(H100.engine_step_s(tokens, 0) for tokens in chunks) == pytest.approx(0.126)


def test_a_batch_costs_less_than_its_items_and_more_than_one() -> None:
    assert H100.encode_s([100]) < H100.encode_s([100] * 8) < 8 * H100.encode_s([100])


def test_decoding_more_sequences_costs_little() -> None:
    assert H100.engine_step_s(0, 1) < H100.engine_step_s(0, 16) < 2 * H100.engine_step_s(0, 1)


async def test_what_a_timer_is_late_the_next_sleeps_are_shorter_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 6))
        now += seconds + 0.003

    monkeypatch.setattr("epd_sim.device.asyncio.sleep", sleep)
    monkeypatch.setattr("epd_sim.device.time.monotonic", lambda: now)
    punctual = PunctualSleep()
    for seconds in (0.005, 0.005, 0.001, 0.005):
        await punctual(seconds)
    assert slept == [0.005, 0.002, 0.0, 0.0]


def test_profiles_have_whole_signatures_in_a_row() -> None:
    assert all(profile.width % 16 == 0 for profile in PROFILES.values())
    with pytest.raises(UnknownProfileError, match="instant"):
        profile_named("gpt")


# -- answers ---------------------------------------------------------------------------------------


def chat(*parts: dict[str, object] | str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


PART = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


def test_every_word_hangs_on_all_that_was_given() -> None:
    body = chat(PART, "and", PART, max_tokens=1)
    right = expected_answer(body, [b"a", b"b"])
    assert right == expected_answer(body, [b"a", b"b"])
    others = [
        expected_answer(body, [b"b", b"a"]),
        expected_answer(body, [b"a", b"a"]),
        expected_answer(chat(PART, "or", PART, max_tokens=1), [b"a", b"b"]),
        expected_answer(chat("and", PART, PART, max_tokens=1), [b"a", b"b"]),
    ]
    assert len({right, *others}) == 5


def test_an_answer_shows_which_item_was_which() -> None:
    words = expected_answer(chat(PART, PART, "x"), [b"a", b"b"]).split()
    assert words[1:3] == [signature(data).hex()[:8] for data in (b"a", b"b")]
    assert len(words) == 18


def test_choices_differ_and_media_must_be_as_many_as_parts() -> None:
    body = chat("x", n=2)
    assert expected_answer(body) != expected_answer(body, choice=1)
    with pytest.raises(ValueError, match="more media parts"):
        expected_answer(chat(PART))
    with pytest.raises(ValueError, match="1 more than"):
        expected_answer(chat("x"), [b"a"])


def test_a_limit_ends_an_answer_and_ignore_eos_goes_on_to_it() -> None:
    assert len(expected_answer(chat("x", max_tokens=3)).split()) == 3
    assert len(expected_answer(chat("x", max_tokens=100)).split()) == 16
    assert len(expected_answer(chat("x", max_tokens=100, ignore_eos=True)).split()) == 100
    assert len(expected_answer({"prompt": "x", "ignore_eos": True}).split()) == 16
    assert answer_words(["x"], 3) == answer_words(["x"], 50)[:3]


def test_completions_take_texts_and_token_ids() -> None:
    assert completion_prompts(["a", [1, 2, 3]]) == [[Text("a")], [Text("1 2 3", 1)]]
    assert completion_prompts([1, 2, 3])[0][0].tokens == 3  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="prompt must be"):
        completion_prompts([])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"stream": "no"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_parameters_that_cannot_be_are_refused_by_name(
    fields: dict[str, object], param: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        read_parameters("/v1/chat/completions", fields)
    assert refused.value.param == param


def test_null_and_unknown_fields_have_no_effect() -> None:
    fields = {"max_tokens": None, "n": None, "tools": None, "something": [1]}
    assert read_parameters("/v1/chat/completions", fields).limit is None
