"""vLLM's command line on its CPU build: ``python -m epd_vllm.serve MODEL ...`` for ``vllm serve MODEL ...``.

Nothing of the command line is changed. vLLM's CPU build needs two repairs and some environment variables
before it starts (see ``compat``); this process and those that it starts get them. Elsewhere ``vllm serve``
needs none of it.
"""

from __future__ import annotations

import sys

from epd_common.errors import EpdError
from epd_vllm.compat import prepare_environment


def main() -> None:
    try:
        prepare_environment()
    except EpdError as error:
        sys.exit(f"epd_vllm.serve: {error.message}")
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    vllm_main()


if __name__ == "__main__":  # vLLM's child processes import this module again
    main()
