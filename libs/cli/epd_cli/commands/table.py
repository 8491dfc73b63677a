"""All commands, in the order in which the help has them."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from epd_cli.bench_arguments import add_bench_arguments
from epd_cli.commands import asking, letters, looking_over, measuring, starting, watching
from epd_cli.key import add_key_arguments, run_key
from epd_cli.plan_arguments import add_plan_arguments


class Command(NamedTuple):
    """A command: its name, its options, what it does (its exit code), and that in words."""

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Awaitable[int]]
    summary: str


COMMANDS = (
    Command(
        "up",
        starting.add_up_arguments,
        starting.run_up,
        "Start everything on this machine, with brokers of its own.",
    ),
    Command(
        "demo",
        starting.add_demo_arguments,
        starting.run_demo,
        "Start everything, ask what is known, give a verdict.",
    ),
    Command(
        "submit",
        asking.add_submit_arguments,
        asking.run_submit,
        "Send one request over NATS, without the gateway.",
    ),
    Command(
        "status",
        watching.add_status_arguments,
        watching.run_status,
        "Show the workers; exit code 1 if no model is ready.",
    ),
    Command(
        "explain",
        asking.add_explain_arguments,
        asking.run_explain,
        "Show what became of a request; exit code 1 if no gateway remembers it.",
    ),
    Command(
        "cancel",
        asking.add_cancel_arguments,
        asking.run_cancel,
        "End requests; exit code 1 if nobody had one.",
    ),
    Command(
        "audit",
        watching.add_audit_arguments,
        watching.run_audit,
        "Compare what came in with what became of it; exit code 1 where it does not add up.",
    ),
    Command(
        "dlq",
        letters.add_dlq_arguments,
        letters.run_dlq,
        "Look at the jobs that were given up, and what to do with them.",
    ),
    Command(
        "bench",
        add_bench_arguments,
        measuring.run_bench_here,
        "Measure a server; exit code 2 where nothing could be.",
    ),
    Command(
        "plan",
        add_plan_arguments,
        measuring.run_plan_here,
        "Tell what a load needs, by a model; exit code 2 where nothing can be.",
    ),
    Command("key", add_key_arguments, run_key, "Make API keys for the gateway."),
    Command(
        "doctor",
        looking_over.add_doctor_arguments,
        looking_over.run_doctor,
        "Check this machine and the brokers, and say what to do; exit code 1 where something is wrong.",
    ),
    Command(
        "top",
        watching.add_top_arguments,
        watching.run_top,
        "Watch workers, queues and requests live.",
    ),
)
