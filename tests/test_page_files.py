"""The files of the web page: how they are given out, what they never hold, and that the wheel has them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd_common.api_keys import ApiKey, hash_key
from epd_gateway import page
from service_stack import ServiceStack, bare_stack

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "services" / "gateway" / "epd_gateway" / "page"
SCRIPTS = sorted(FOLDER.glob("*.js"))


@pytest.fixture(scope="module")
async def stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    """A gateway alone, which asks for keys; the client has none."""
    line = ApiKey(hash=hash_key(b"right"), tenant="a").line()
    async with bare_stack(nats_url, redis_url, tmp_path_factory.mktemp("page")) as running:
        await running.add_gateway(api_keys=line)
        yield running


@pytest.mark.parametrize("path", [page.PAGE, *(f"{page.PAGE}/{name}" for name in page.FILES)])
async def test_a_file_is_open_strict_and_cached(stack: ServiceStack, path: str) -> None:
    answer = await stack.http.get(path)
    assert answer.status_code == 200
    name = path.rpartition("/")[2]
    file, kind = (
        ("index.html", "text/html; charset=utf-8")
        if path == page.PAGE
        else (name, page.FILES[name])
    )
    assert answer.content == (FOLDER / file).read_bytes()
    assert answer.headers["content-type"] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
    assert "unsafe" not in str(policy) and "*" not in str(policy)
    assert answer.headers["cache-control"] == "no-cache"
    etag = answer.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = await stack.http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    other = await stack.http.get(path, headers={"if-none-match": '"other"'})
    assert other.content == answer.content
    head = await stack.http.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)


async def test_the_page_is_found_with_a_slash_behind_it(stack: ServiceStack) -> None:
    answer = await stack.http.get("/ui/", follow_redirects=True)
    assert (answer.status_code, answer.url.path) == (200, page.PAGE)


@pytest.mark.parametrize(
    "path",
    ["/ui/api/live", "/ui/api/requests/x", "/ui/page.py", "/ui/index.html", "/ui/../metrics2"],
)
async def test_all_else_there_needs_a_key(stack: ServiceStack, path: str) -> None:
    assert (await stack.http.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/ui/page.py", "/ui/..%2fpage.py", "/ui/nothing.js"])
async def test_nothing_else_is_given_out(stack: ServiceStack, path: str) -> None:
    answer = await stack.http.get(path, headers={"authorization": "Bearer right"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("not_found", "unknown_route")


def test_every_file_of_the_folder_is_one_that_is_given_out() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {page.INDEX, *page.FILES}


def test_nothing_comes_from_elsewhere() -> None:
    for path in FOLDER.iterdir():
        found = re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"^\s*//.*", "", path.read_text(), flags=re.M)
        )
        assert set(found) <= {"http://www.w3.org"}, path.name  # SVG's namespace


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_of_text(path: Path) -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc"
    assert not re.findall(makers, path.read_text())


def test_every_module_that_is_imported_is_there() -> None:
    for path in SCRIPTS:
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert name in page.FILES


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        tmp_path,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {f"epd_gateway/page/{path.name}" for path in FOLDER.iterdir()} <= inside
