"""CPU time of processes of this machine, those that they started included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil


def cpu_seconds(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """CPU seconds that processes have used since their start, by the names under which they are given.

    Args:
        processes: Ids by name, e.g. of a role. Those that have ended count nothing.
    """
    return {name: sum(map(_seconds, pids)) for name, pids in processes.items()}


def _seconds(pid: int) -> float:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0.0
    used = 0.0
    for member in family:
        try:
            times = member.cpu_times()
        except psutil.Error:
            continue
        used += times.user + times.system
        if member.pid == pid:  # children that have ended, and were waited for
            used += times.children_user + times.children_system
    return used


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was used between two looks; never less than nothing, as a process may have been replaced."""
    return {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after}
