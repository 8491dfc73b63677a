"""Deadlines of jobs: points in time, as jobs cross machines, none further off than a bound. Pure."""

from __future__ import annotations


def bounded(deadline: float, *, published: float, limit_s: float) -> float:
    """The deadline that counts, in seconds since the Unix epoch.

    Args:
        deadline: The job's own; 0 is none.
        published: When it was put into its queue.
        limit_s: What it may take from then on.
    """
    latest = published + limit_s
    return min(deadline, latest) if deadline else latest
