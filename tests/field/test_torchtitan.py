"""torchtitan's own FSDP2 recipe, from the code of docs/torchtitan.md, holds."""

from __future__ import annotations

import re
from pathlib import Path

from test_stacks import result

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"


def test_the_recipe_of_the_page_holds(tmp_path: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        named = re.match(r"# (\S+\.py)\n", block)
        if named:
            (tmp_path / named[1]).write_text(block)
    titan = tmp_path / "titan.py"
    done = result(
        tmp_path / "report",
        f"{titan}:recipe",
        f"{titan}:mixed",
        "--model",
        f"{tmp_path / 'titan_model.py'}:small",
        "--world-sizes",
        "2,3",
        "--max-cases",
        "6",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
