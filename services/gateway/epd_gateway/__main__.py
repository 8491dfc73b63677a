"""``epd-gateway``: settings in, exit code out."""

from __future__ import annotations

import sys

from epd_common.lifecycle import run_service
from epd_gateway.service import serve
from epd_gateway.settings import GatewaySettings


def main() -> None:
    sys.exit(run_service(GatewaySettings, serve))


if __name__ == "__main__":
    main()
