"""What each role may do on NATS: the rights it needs, and no others.

``epd up`` gives them to the services it starts; ``deploy/nats/users.conf`` is made from them.

Who can send a request makes its receiver publish to a subject of the sender's choice, as the reply. So no
role has ``allow_responses``: replies go to inboxes alone, and to those that the lists name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd_common.protocol import subjects

_STREAMS = (
    subjects.ENCODE_STREAM,
    subjects.GENERATE_STREAM,
    subjects.DLQ_STREAM,
    subjects.EXHAUSTED_STREAM,
    f"KV_{subjects.WORKERS_BUCKET}",
)
_REGISTRY = _STREAMS[-1]
CLIENT_INBOX = "_INBOX.client"
"""What the inboxes of the shipped user for clients begin with."""

_ANY_INBOX = "_INBOX.>"
_DECODE_JOBS = f"epd.v1.generate.*.*.{subjects.DECODE_PLACE}"
"""Which prefill workers alone may publish: they name the memory that is read."""


@dataclass(frozen=True, slots=True)
class NatsRole:
    """The subjects of one user; what is not listed is refused."""

    about: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never_publish: tuple[str, ...] = ()

    def permissions(self) -> str:
        """As a block of the server's configuration."""
        publish = f"allow: {_listed(self.publish)}"
        if self.never_publish:
            publish += f"\n        deny: {_listed(self.never_publish)}"
        return f"""\
permissions: {{
      publish: {{
        {publish}
      }}
      subscribe: {{
        allow: {_listed(self.subscribe)}
      }}
    }}"""


def _listed(names: tuple[str, ...]) -> str:
    lines = "".join(f'\n          "{name}"' for name in names)
    return f"[{lines}\n        ]"


def _inboxes(role: str) -> str:
    return f"{subjects.inbox_prefix(role)}.>"


def _create() -> tuple[str, ...]:
    """Look whether the streams are there, and make them: whoever starts first does. Not change them."""
    verbs = ("INFO", "CREATE")
    return tuple(f"$JS.API.STREAM.{verb}.{stream}" for stream in _STREAMS for verb in verbs)


def _service(role: str) -> tuple[str, ...]:
    """What all services publish: their record, and answers to people (and health checks) who ask how
    they are.
    """
    return (
        "epd.v1.health.*",
        f"$KV.{subjects.WORKERS_BUCKET}.{role}.*",
        _inboxes(role),
        _inboxes("operator"),
        _ANY_INBOX,
        *_create(),
    )


def _served(role: str) -> tuple[str, ...]:
    """What all services listen to."""
    return (
        _inboxes(role),
        "$SRV.*",
        f"$SRV.*.epd-{role}",
        f"$SRV.*.epd-{role}.*",
        "epd.v1.health.*",
    )


def _watch() -> tuple[str, ...]:
    """Follow the registry."""
    return (
        f"$JS.API.STREAM.INFO.{_REGISTRY}",
        f"$JS.API.CONSUMER.CREATE.{_REGISTRY}",
        f"$JS.API.CONSUMER.INFO.{_REGISTRY}.*",
        f"$JS.FC.{_REGISTRY}.>",
    )


def _pull(stream: str) -> tuple[str, ...]:
    """Take jobs from a queue."""
    return (
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        f"$JS.ACK.{stream}.>",
    )


def _bury(stream: str) -> tuple[str, ...]:
    """Take jobs off a queue that nobody will get any more."""
    return (
        *_pull(subjects.EXHAUSTED_STREAM),
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.STREAM.MSG.DELETE.{stream}",
    )


NATS_ROLES: dict[str, NatsRole] = {
    "gateway": NatsRole(
        about="Sends requests. It alone of the services may change what the streams are.",
        publish=(
            "epd.v1.generate.>",
            "epd.v1.encode.>",
            "epd.v1.cancel.*",
            "epd.v1.replay.*",
            "epd.v1.progress.*",
            *_service("gateway"),
            *(f"$JS.API.STREAM.UPDATE.{stream}" for stream in _STREAMS),
            f"$JS.API.STREAM.MSG.DELETE.{subjects.GENERATE_STREAM}",
            f"$JS.API.STREAM.MSG.DELETE.{subjects.ENCODE_STREAM}",
            *_watch()[1:],
        ),
        subscribe=(
            *_served("gateway"),
            "epd.v1.cancel.*",
            "epd.v1.explain.*",
            "epd.v1.held.*",
            "epd.v1.ready.*",
        ),
        never_publish=(f"{CLIENT_INBOX}.>",),
    ),
    "encoder": NatsRole(
        about="Takes encode jobs, and tells what became of them. It sees no request and answers none.",
        publish=(
            "epd.v1.ready.*",
            "epd.v1.dlq.encode",
            *_service("encoder"),
            *_pull(subjects.ENCODE_STREAM),
            *_bury(subjects.ENCODE_STREAM),
        ),
        subscribe=_served("encoder"),
        never_publish=(f"{CLIENT_INBOX}.>",),
    ),
    "pd": NatsRole(
        about="Takes generate jobs and answers them; orders encodes, and does them where encoders fail.",
        publish=(
            "epd.v1.encode.>",
            _DECODE_JOBS,
            "epd.v1.ready.*",
            "epd.v1.held.*",
            "epd.v1.dlq.*",
            _inboxes("gateway"),
            *_service("pd"),
            *_pull(subjects.GENERATE_STREAM),
            *_pull(subjects.ENCODE_STREAM),
            *_bury(subjects.GENERATE_STREAM),
            *_bury(subjects.ENCODE_STREAM)[-2:],
            *_watch()[1:],
        ),
        subscribe=(
            *_served("pd"),
            "epd.v1.ready.*",
            "epd.v1.cancel.*",
            "epd.v1.replay.*",
            "epd.v1.progress.*",
        ),
    ),
    "client": NatsRole(
        about="Publishes jobs itself, with its media inline, and reads its own answers. Give each client a "
        f"user with inboxes of its own in the place of {CLIENT_INBOX}.",
        publish=(
            "epd.v1.generate.>",
            "epd.v1.cancel.*",
            "epd.v1.replay.*",
            "epd.v1.progress.*",
            f"{CLIENT_INBOX}.>",
            *_watch(),
            f"$JS.API.DIRECT.GET.{_REGISTRY}.>",
            f"$JS.API.STREAM.MSG.GET.{_REGISTRY}",
        ),
        subscribe=(f"{CLIENT_INBOX}.>",),
        never_publish=(_DECODE_JOBS,),
    ),
    "operator": NatsRole(
        about="People and their tools: `epd status`, `epd submit`, the Python client, the NATS command line "
        f"with --inbox-prefix {subjects.inbox_prefix('operator')}.",
        publish=(
            "epd.v1.>",
            "$JS.API.>",
            "$JS.ACK.>",
            "$JS.FC.>",
            f"$KV.{subjects.WORKERS_BUCKET}.>",
            "$SRV.>",
            _inboxes("operator"),
        ),
        subscribe=(
            "epd.v1.>",
            f"$KV.{subjects.WORKERS_BUCKET}.>",
            "$JS.EVENT.>",
            _inboxes("operator"),
        ),
    ),
}

FILE_HEAD = """\
# Users of NATS and what each may do: include this file in the server's configuration.
# Made from libs/cli/epd_cli/nats_users.py by scripts/write_docs.py.
#
# The passwords come from the server's environment; quote them there ('"12e3"'), or one like 12e3 is a
# number. In the place of user and password a user may have an NKey: { nkey: U..., permissions: ... };
# its process then has EPD_NATS_NKEY_SEED_FILE. To bind a worker to its own record in the registry, give it
# a user of its own with its EPD_WORKER_ID in the place of the * behind $KV.epd_workers.ROLE.
"""


def users(password: Callable[[str], str]) -> str:
    """A user for each role, as entries of the server's list of users.

    Args:
        password: Of a role, as it is to stand in the configuration.
    """
    return "".join(
        f"    # {role.about}\n"
        f"    {{ user: {name}, password: {password(name)}, {role.permissions()} }}\n"
        for name, role in NATS_ROLES.items()
    )


def users_file() -> str:
    """``deploy/nats/users.conf``."""
    entries = users(lambda role: f"$EPD_NATS_{role.upper()}_PASSWORD")
    return f"{FILE_HEAD}authorization {{\n  users: [\n{entries}  ]\n}}\n"
