"""Stand-in for `gh api`, on a GitHub that is the JSON file GITHUB_STATE.

Filters are run by jq, page by page as gh does. A token without the right to write gets the answer
that GitHub gives to one of a fork.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jq

PAGE = 2
"""Comments on a page."""


class Refused(Exception):
    """GitHub's answer, as gh prints it."""


def answer(state: dict[str, Any], method: str, endpoint: str, fields: dict[str, str]) -> list[Any]:
    """Return the pages of a response; a write changes the state."""
    path = endpoint.partition("?")[0]
    if path == "graphql":
        return [{"data": {"viewer": {"login": state["login"]}}}]
    comments = state["comments"]
    if method == "GET" and re.fullmatch(r"repos/me/my/issues/7/comments", path):
        return [comments[at : at + PAGE] for at in range(0, len(comments), PAGE)] or [[]]
    if method == "GET" and path == "repos/me/my/pulls":
        return [[pull for pull in state["pulls"] if pull["source"] == fields["head"]]]
    if method == "GET" and path == "repos/me/my/actions/runs/31/artifacts":
        artifacts = state["artifacts"]
        return [{"artifacts": [item for item in artifacts if item["name"] == fields["name"]]}]
    if state["read_only"]:
        raise Refused("gh: Resource not accessible by integration (HTTP 403)")
    if method == "POST" and re.fullmatch(r"repos/me/my/issues/7/comments", path):
        comments.append(
            {"id": len(comments), "user": {"login": state["login"]}, "body": fields["body"]}
        )
        return [comments[-1]]
    if method == "PATCH" and (match := re.fullmatch(r"repos/me/my/issues/comments/(\d+)", path)):
        comments[int(match[1])]["body"] = fields["body"]
        return [comments[int(match[1])]]
    raise Refused(f"gh: Not Found (HTTP 404): {method} {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["api"])
    parser.add_argument("endpoint")
    parser.add_argument("--method")
    parser.add_argument("--paginate", action="store_true")
    parser.add_argument("--jq")
    parser.add_argument("--raw-field", action="append", default=[])
    parser.add_argument("--field", action="append", default=[])
    options = parser.parse_args()
    if not os.environ.get("GH_TOKEN"):
        sys.exit("gh: set the GH_TOKEN environment variable")
    fields = dict(field.split("=", 1) for field in options.raw_field)
    for field in options.field:
        key, value = field.split("=", 1)
        fields[key] = sys.stdin.read() if value == "@-" else value
    method = options.method or ("POST" if fields else "GET")
    file = Path(os.environ["GITHUB_STATE"])
    state = json.loads(file.read_text())
    if archive := re.fullmatch(r"repos/me/my/actions/artifacts/(\d+)/zip", options.endpoint):
        sys.stdout.buffer.write(Path(state["archives"][archive[1]]).read_bytes())
        return
    try:
        pages = answer(state, method, options.endpoint, fields)
    except Refused as refusal:
        sys.exit(str(refusal))
    file.write_text(json.dumps(state))
    for page in pages if options.paginate else pages[:1]:
        for value in jq.compile(options.jq).input_value(page) if options.jq else [page]:
            print(value if isinstance(value, str) else json.dumps(value))


if __name__ == "__main__":
    main()
