"""Requests through a small cluster whose processes are killed, frozen and restarted all the while.

    python -m bench.chaos --requests 1500 --seed 1

Gateways, encoders, PD workers (simulated engine), three NATS servers and a Valkey, all as processes of this
machine. Each request's right answer is known to the client. See ``docs/chaos.md``.
"""
