"""vLLM's scheduler, which joins gate, connector, cache manager and KV events, and sleeps while all requests
wait.

While a request waits inside the engine, vLLM's core loop polls every millisecond. With ``sleep_when_stalled``
in the connector's extra configuration this scheduler says that it has nothing to do when its last pass
scheduled nothing and every reason is a missing embedding. Any message to the engine makes it look again, so
whoever pins an embedding sends one (``VllmPdEngine.wake``).

A request that waits inside holds the memory of what was prefilled. It must not keep out those that could
run, least of all the encode that it waits for: where one of them finds no room, the last request that waits
gives its memory back and begins anew once all its embeddings are there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import EventPublisher, KVEventBatch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from epd_vllm.cache_manager import GatedEncoderCacheManager
from epd_vllm.connector import EpdConnector
from epd_vllm.gate import Gate
from epd_vllm.kv_events import KvEvents

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class _Gated(Scheduler):
    """What both variants add to vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalled = False
        self._blocked = False
        """Whether somebody who could run found no room, and requests that wait have some."""
        self._sleeps = False
        self._gate: Gate | None = None
        self._kv_events: KvEvents | None = None
        if isinstance(self.ec_connector, EpdConnector) and self.ec_connector.is_consumer:
            self._gate = self.ec_connector.gate
            self._gate.manager = self.encoder_cache_manager
            self._sleeps = self.ec_connector.sleep_when_stalled
            if isinstance(self.encoder_cache_manager, GatedEncoderCacheManager):
                self.encoder_cache_manager.gate = self._gate
            if self.enable_kv_cache_events and (pipe := self.ec_connector.kept_pipe):
                publisher: EventPublisher = self.kv_event_publisher
                self._kv_events = KvEvents(publisher, Path(pipe), block_tokens=self.hash_block_size)
                self.kv_event_publisher: EventPublisher = self._kv_events

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._gate is None:
            return super().schedule(*args, **kwargs)
        if self._blocked:
            self._make_way(self._gate)
        self._gate.new_pass()
        self._gate.missing.clear()
        output = super().schedule(*args, **kwargs)
        self._blocked = self._keeps_others_out(self._gate, output)
        self._stalled = (
            output.total_num_scheduled_tokens == 0
            and bool(self._gate.missing)
            and not self._blocked
        )
        return output

    def _keeps_others_out(self, gate: Gate, output: SchedulerOutput) -> bool:
        """Whether there are both: requests that could run and did not get in, and ones that only wait."""
        if output.total_num_scheduled_tokens >= self.max_num_scheduled_tokens:
            return False  # there was no time for them; the next step has some
        return any(not gate.waits(request) for request in self.waiting) and any(
            gate.waits(request) for request in self.running
        )

    def _make_way(self, gate: Gate) -> None:
        """Take the memory of the request that came last among those that wait."""
        for request in reversed(self.running):
            if gate.waits(request):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                gate.bar(request.request_id)
                return

    def add_request(self, request: Request) -> None:
        self._stalled = False
        super().add_request(request)
        if self._kv_events is not None:
            self._kv_events.came(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        self._stalled = False
        finished = super().finish_requests(*args, **kwargs)
        if self._kv_events is not None:
            self._kv_events.left()
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        # vLLM tells with the next step, which may be long in coming.
        if self._kv_events is not None and (events := self.kv_cache_manager.take_events()):
            self._kv_events.publish(KVEventBatch(ts=time.time(), events=events))
        return done

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.total_num_scheduled_tokens:
            self._stalled = False  # with async scheduling a step was under way
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._kv_events is not None:
            self._kv_events.computed(list(scheduler_output.num_scheduled_tokens))
        return outputs

    def has_requests(self) -> bool:
        if not super().has_requests():
            return False
        if not (self._sleeps and self._stalled) or self._gate is None:
            return True
        if self.connector is not None and (self.has_finished_requests() or self.kv_holding_waiting):
            return True  # keys and values are on their way: nobody says when they have come
        if self.finished_req_ids or self._gate.has_unavailable or self._gate.arrived():
            self._stalled = False
            return True
        return False


class GatedScheduler(_Gated):
    """For engines without async scheduling."""


class GatedAsyncScheduler(_Gated, AsyncScheduler):
    """For engines with async scheduling, which is vLLM's default on GPUs."""
