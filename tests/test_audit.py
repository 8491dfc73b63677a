"""The audit of dependencies never says "nothing known" where nobody looked."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "audit.py"
CANARY = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}
KNOWN = {"vulns": [{"id": "GHSA-x"}, {"id": "PYSEC-y"}]}

Service = Callable[[list[Any]], bytes]


class Server(HTTPServer):
    """An advisory service that answers as it is told."""

    service: Service

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/querybatch"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = self.server.service(asked["queries"])
        self.send_response(200 if body else 500)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def run(url: str, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--url", url, *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def knowing(*names: str) -> Service:
    """A service that knows the canary, and advisories of these."""

    def answer(queries: list[Any]) -> bytes:
        found = [
            KNOWN if query == CANARY or query["package"]["name"] in names else {}
            for query in queries
        ]
        return json.dumps({"results": found}).encode()

    return answer


def test_what_is_known_is_said(server: Server) -> None:
    server.service = knowing("pillow", "vllm")
    code, out = run(server.url)
    assert code == 1
    assert "pillow 1" in out and "GHSA-x, PYSEC-y" in out
    assert "vllm 0.3" in out  # asked for under the name that advisories have
    assert "2 of" in out


def test_nothing_known(server: Server) -> None:
    server.service = knowing()
    assert run(server.url, "--strict")[0] == 0
    assert "dependencies audited: 0 of" in run(server.url)[1]


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        (lambda queries: json.dumps({"results": [{} for _ in queries]}).encode(), "blind"),
        (lambda queries: json.dumps({"results": [KNOWN]}).encode(), "for every package"),
        (lambda queries: b"<html>log in</html>", "cannot be read"),
        (lambda queries: b"[]", "cannot be read"),
        (lambda queries: b"", "no advisory service reachable"),
    ],
    ids=["blind", "short", "page", "other", "error"],
)
def test_not_audited_is_said_plainly(server: Server, service: Service, reason: str) -> None:
    server.service = service
    code, out = run(server.url)
    assert code == 0
    assert out.startswith("dependencies not audited: ") and reason in out
    assert run(server.url, "--strict")[0] == 2


def test_nobody_there() -> None:
    assert run("http://127.0.0.1:9/", "--strict") == (
        2,
        "dependencies not audited: no advisory service reachable "
        "(<urlopen error [Errno 111] Connection refused>)\n",
    )
