"""Runs first in each Python process that vLLM starts; see ``epd_vllm.compat.prepare_child``.

Python runs one ``sitecustomize``, the first on its path; the next one, if any, is run from here.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from epd_vllm.compat import prepare_child

prepare_child()

_here = Path(__file__).resolve().parent
_next = PathFinder.find_spec(__name__, [p for p in sys.path if Path(p).resolve() != _here])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
