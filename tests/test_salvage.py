"""Answering jobs that do not decode: what of their address can be read."""

from __future__ import annotations

from typing import Any, cast

import msgpack
import pytest

from epd_common.bus import Bus
from epd_pd.salvage import writer_for_undone

NO_BUS = cast(Bus, None)  # a writer that is made writes nothing


def has_address(job: Any) -> bool:
    data = job if isinstance(job, bytes) else msgpack.packb(job)
    return writer_for_undone(NO_BUS, data, attempt=1, worker="w") is not None


@pytest.mark.parametrize("more", [{}, {7: "a key that is no text"}, {b"x": 1}, {"items": [0]}])
def test_an_inbox_is_found_beside_what_is_wrong(more: dict[Any, Any]) -> None:
    assert has_address({"inbox": "_INBOX.x", "request_id": "r", **more})


@pytest.mark.parametrize(
    "job",
    [
        {"request_id": "r"},
        {"inbox": 5},
        {"inbox": "epd.v1.ready.x"},
        {"inbox": "_INBOX.x", "request_id": 5},
        ["inbox", "_INBOX.x"],
        b"",
        b"\x91" * 100_000,
    ],
)
def test_without_one_there_is_nobody_to_tell(job: Any) -> None:
    assert not has_address(job)
