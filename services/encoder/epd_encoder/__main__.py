"""``epd-encoder``: settings in, exit code out."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from epd_common.health import main_healthcheck
from epd_common.lifecycle import run_service
from epd_encoder.engines import make_engine
from epd_encoder.service import EncoderService
from epd_encoder.settings import EncoderSettings


async def serve(settings: EncoderSettings, stop: asyncio.Event) -> None:
    await EncoderService(settings, partial(make_engine, settings)).run(stop)


def main() -> None:
    if "--healthcheck" in sys.argv[1:]:
        sys.exit(main_healthcheck("encoder"))
    sys.exit(run_service(EncoderSettings, serve))


if __name__ == "__main__":
    main()
