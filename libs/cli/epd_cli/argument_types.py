"""Arguments as they are typed. Loads nothing, as each command builds the whole parser."""

from __future__ import annotations

import argparse
import math

MAX_NUMBER = (1 << 63) - 1
"""``epd_common.bus.dead_letters.MAX_NUMBER``."""

JOB_MAX_AGE_S = 3600.0
"""``epd_common.bus.streams.JOB_MAX_AGE_S``."""


def letter_number(text: str) -> int:
    """A letter's number as typed.

    Raises:
        argparse.ArgumentTypeError: no letter has such a one.
    """
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:20]) <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is no letter's number; these are 1 or more")
    return int(text)


def new_deadline(text: str) -> float:
    """Seconds that a job gets anew, as typed.

    Raises:
        argparse.ArgumentTypeError: none that a job could have.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= JOB_MAX_AGE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time for a job: more than 0 and at most {JOB_MAX_AGE_S:g} seconds"
        )
    return seconds


def port(text: str) -> int:
    """A port as typed.

    Raises:
        argparse.ArgumentTypeError: there is none with this number.
    """
    if not text.isascii() or not text.isdigit() or int(text[:20]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 65535")
    return int(text)


def interval(text: str) -> float:
    """Seconds between two looks, as typed.

    Raises:
        argparse.ArgumentTypeError: no time that makes sense.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds
