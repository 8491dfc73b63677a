"""NATS: the connection, streams and consumers, pulling jobs, the worker registry.

``Bus`` is the connection; everything else is built on one.
"""

from epd_common.bus.connection import Bus
from epd_common.bus.delivery import Delivery
from epd_common.bus.puller import JobPuller
from epd_common.bus.registry import Registry, WorkerView, announce
from epd_common.bus.streams import declare_consumers, declare_place, declare_streams

__all__ = [
    "Bus",
    "Delivery",
    "JobPuller",
    "Registry",
    "WorkerView",
    "announce",
    "declare_consumers",
    "declare_place",
    "declare_streams",
]
