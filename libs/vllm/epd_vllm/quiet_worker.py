"""vLLM's CPU worker without listening sockets, for engines of one rank.

Every process group of torch's gloo backend listens on a port of its own, a dozen for an engine, although a
group of one rank has nobody to talk to. For that case torch has a backend that does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed
from vllm.v1.worker.cpu_worker import CPUWorker


class QuietCPUWorker(CPUWorker):
    """Given to vLLM by ``--worker-cls``."""

    def init_device(self) -> None:
        if self.parallel_config.world_size > 1:
            super().init_device()
            return
        with _groups_of_one():
            super().init_device()


@contextlib.contextmanager
def _groups_of_one() -> Iterator[None]:
    """Process groups made meanwhile use the backend that does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, new = torch.distributed.init_process_group, torch.distributed.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        return init("fake", store=FakeStore(), rank=0, world_size=1)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **(kwargs | {"backend": "fake"}))

    torch.distributed.init_process_group = init_process_group
    torch.distributed.new_group = new_group
    try:
        yield
    finally:
        torch.distributed.init_process_group = init
        torch.distributed.new_group = new
