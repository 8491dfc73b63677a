"""Accounts of what came in and what became of it, which add up by the way they are kept.

Each thing that comes is entered once and ends once, by one name; what has not ended is running. Whether
that is true is seen from elsewhere: jobs in work, replies that are open, pins that are held (``epd audit``).
"""

from __future__ import annotations

from collections import Counter


class Account:
    """``received`` = the sum of ``ended`` + ``running``, at any moment."""

    def __init__(self) -> None:
        self.received = 0
        self.ended: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return self.received - self.ended.total()

    def enter(self) -> Entry:
        """One more has come."""
        self.received += 1
        return Entry(self)

    def report(self) -> dict[str, int]:
        """``received``, ``running``, and the number of each end."""
        return {"received": self.received, "running": self.running, **self.ended}


class Entry:
    """One that has come; the first end that is told counts."""

    __slots__ = ("_account", "over")

    def __init__(self, account: Account) -> None:
        self._account = account
        self.over = False

    def end(self, how: str) -> None:
        if not self.over:
            self.over = True
            self._account.ended[how] += 1
