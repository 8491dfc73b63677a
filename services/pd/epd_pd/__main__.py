"""``epd-pd``: settings in, exit code out."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from epd_common.health import main_healthcheck
from epd_common.lifecycle import run_service
from epd_pd.engines import make_engine
from epd_pd.service import PdService
from epd_pd.settings import PdSettings


async def serve(settings: PdSettings, stop: asyncio.Event) -> None:
    await PdService(settings, partial(make_engine, settings)).run(stop)


def main() -> None:
    if "--healthcheck" in sys.argv[1:]:
        sys.exit(main_healthcheck("pd"))
    sys.exit(run_service(PdSettings, serve))


if __name__ == "__main__":
    main()
