"""The page runs its own script alone, and files of reports obey the umask."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path

import hand_made

from zerocheck.report.html.page import render
from zerocheck.report.replace_file import replace_file
from zerocheck.run.records.tally import tally


def test_no_other_script_is_run() -> None:
    page = render(tally(hand_made.held()))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1].replace("&#39;", "'")
    assert f"sha256-{digest}" in policy[1].replace("&#43;", "+")


def test_a_replaced_file_obeys_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        replace_file(tmp_path / "report.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "report.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["report.json"]
