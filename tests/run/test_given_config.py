"""A run of a DeepSpeed config: its findings name it, and are replayed with it alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from borrowing import borrowed
from collected import RunsOf

from zerocheck.errors import UsageError
from zerocheck.ranks.pool import Pool
from zerocheck.run.findings.case_file import read, read_for_replay
from zerocheck.run.records.finding_text import replay_line
from zerocheck.run.replay import replay
from zerocheck.script import script_of

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def ranks(deepspeed_pool: Pool) -> Iterator[Pool]:
    with borrowed(deepspeed_pool, patience_s=20.0) as pool:
        yield pool


@pytest.mark.long
def test_a_finding_names_its_config_and_is_replayed_with_it(ranks: Pool, tmp_path: Path) -> None:
    """On 2 ranks a stage 3 that divides by 2 beforehand never multiplies by it again."""
    name, other = (str(tmp_path / file) for file in ("ds_config.json", "other.json"))
    given = {
        "train_batch_size": 8,
        "gradient_predivide_factor": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "reduce_scatter": False},
    }
    Path(name).write_text(json.dumps(given))
    run = RunsOf(ranks, tmp_path / "report")
    counted = run(name, world_sizes=(2,), obligations=("gradient", "clip"))
    (found,) = counted.findings
    assert found.fingerprint == f"{name} / gradient / gradient / W"
    assert replay_line(found).endswith(f" --implementation {name}")
    assert list(counted.implementations[name].without) == ["clip"]
    path = Path(found.case_file)
    with pytest.raises(UsageError, match=r"say so again .*: --implementation .*ds_config\.json"):
        read_for_replay(path)
    again = replay(read_for_replay(path, implementation=name), implementation=name, ranks=ranks)
    assert again.exit_code == 1 and "reproduced" in again.verdict
    with pytest.raises(UsageError, match=r"ds_config\.json needs deepspeed"):
        script_of(read(path), implementation=name)
    Path(other).write_text(json.dumps({**given, "gradient_clipping": 0.5}))
    again = replay(read(path), implementation=other, ranks=ranks)
    assert again.outcome.status == "unsupported"
    assert "other.json fixes training.clip as 0.5" in again.finished.reason
