"""A scheduler that writes down each step, for tests of how prefill meets embeddings that arrive late.

Given to the PD engine by ``--scheduler-cls bench.stepping.SteppingScheduler``; it writes ``STEPS`` in the
folder named by ``EPD_RIG_FOLDER``, and after each step deletes what it finds there in ``EVICTED``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from bench.rig_files import EVICTED, FOLDER, STEPS
from epd_vllm.scheduler import GatedScheduler


class SteppingScheduler(GatedScheduler):
    """Notes time, and for each request the tokens computed before and scheduled in the step; then how many
    requests there are, and which share of the KV cache they hold."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if before:
            step = {
                "at": time.time(),
                "requests": {
                    name: [computed, output.num_scheduled_tokens[name]]
                    for name, computed in before.items()
                },
                "running": len(self.running),
                "waiting": len(self.waiting),
                "kv_usage": self.kv_cache_manager.usage,
            }
            folder = Path(os.environ[FOLDER])
            with (folder / STEPS).open("a") as file:
                file.write(json.dumps(step) + "\n")
            for path in (folder / EVICTED).glob("*"):
                path.unlink()
        return output
