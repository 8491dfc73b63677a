"""What the user of the harness got wrong, or what cannot be measured; shown without a traceback."""

from __future__ import annotations

from epd_common.errors import EpdError


class BenchError(EpdError):
    """Nothing was measured, and nothing written; the text says what to change."""

    status = 400
    default_code = "bench_failed"
