"""What an implementation fixes, such as a DeepSpeed config, is what is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from zerocheck.adapters.deepspeed.options import options_of
from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse
from zerocheck.memory.fit.result import FitReport
from zerocheck.memory.fixed import with_fixed
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import source
from zerocheck.memory.verdict import CUDA_CONTEXT

LINEAR = torch.nn.functional.linear
ZERO = {"stage": 2, "reduce_bucket_size": 200_000_000, "overlap_comm": True}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": ZERO,
}


def setup(folder: Path, config: dict[str, Any], **options: Any) -> Setup:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    words = {"world_size": 2, "batch": 2, "sequence": 5, **options}
    made = Setup(model="small_models:small", implementation=str(path), **words)
    return with_fixed(made, frozenset(options))


def test_a_config_is_simulated_as_it_stands(tmp_path: Path) -> None:
    """Two buckets of its size in bf16, since it overlaps; microbatches are its own too."""
    given = setup(tmp_path, CONFIG)
    assert (given.microbatches, given.precision, given.offload) == (2, "mixed", "none")
    peak = analyse(given).peak.bytes
    assert 2 * 2 * 200_000_000 <= peak["bucket"] < 2 * 2 * 200_000_000 + 1_000_000
    assert str(given.case(3).options["deepspeed.overlap_comm"]) == "True"


def test_sizes_are_those_of_users(tmp_path: Path) -> None:
    """Positions and samples beyond those of other cases, and options that differ from defaults."""
    zero = {"stage": 3, "overlap_comm": False, "stage3_max_live_parameters": 2_000_000_000}
    config = {**CONFIG, "zero_optimization": zero}
    given = setup(tmp_path, config, sequence=4096, batch=64, world_size=512)
    case = given.case(100)
    assert (case.data.length, case.data.batch, case.mesh) == (4096, 64, (512,))
    assert len(case.model.blocks) == 100 and case.training.clip == 1.0
    assert not options_of(case).overlap_comm
    assert options_of(case).max_live_parameters == 2_000_000_000
    assert options_of(case).persistence_threshold == 100_000


def test_without_bf16_it_is_fp32(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    given = setup(tmp_path, config)
    assert given.precision == "fp32"
    assert analyse(given).between.words == "8 Psi + 12 Psi/N"


def test_gradients_that_are_summed_in_fp32_count_twice(tmp_path: Path) -> None:
    """DeepSpeed keeps them whole at stage 1, next to bf16 weights."""
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    wide = {**config, "data_types": {"grad_accum_dtype": "fp32"}}
    narrow, given = analyse(setup(tmp_path, config)), analyse(setup(tmp_path, wide))
    assert narrow.between.words == "4 Psi + 12 Psi/N" and narrow.between.paper is None
    assert given.between.words == "6 Psi + 12 Psi/N" and given.between.paper is not None
    assert given.between.unlike == "gradients" and given.between.released == 0
    assert given.between.padding is not None and abs(given.between.padding) <= 4 * 12


def test_stage_3_releases_what_it_gathered(tmp_path: Path) -> None:
    """Linear layers keep parameters for the backward, and no views of what was gathered."""
    gathered = []
    for live in (1, 1_000_000_000):
        sizes = {"stage": 3, "stage3_param_persistence_threshold": 0}
        zero = {**sizes, "stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": 0}
        given = setup(tmp_path, {**CONFIG, "zero_optimization": zero})
        gathered.append(analyse(given).at_end("forward", 1).get("gathered", 0))
    elements = sum(one.numel() for one in source("small_models:small").build().parameters())
    assert gathered[1] >= 2 * elements  # all of it, in bf16
    assert gathered[0] < elements / 4  # the last module, which the backward begins with
    assert torch.nn.functional.linear is LINEAR  # DeepSpeed replaces it, and leaves it so


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("microbatches", 3, "--microbatches 3: .*ds_config.json has 2; leave one of the two out"),
        ("precision", "fp32", "--precision fp32: .*ds_config.json has mixed"),
        ("offload", "pinned", "--offload pinned: .*ds_config.json has none"),
    ],
)
def test_an_option_that_the_config_contradicts(
    option: str, value: object, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        setup(tmp_path, CONFIG, **{option: value})


def fixing(folder: Path, fixed: dict[str, Any]) -> Setup:
    path = folder / "mine.py"
    path.write_text(
        "from zerocheck.adapters.textbook.zero1 import Zero1\n"
        f"class Mine(Zero1):\n    fixed = {fixed!r}\n"
    )
    return Setup(model="small_models:small", implementation=f"{path}:Mine", sequence=5)


def test_an_implementation_that_fixes_its_optimizer(tmp_path: Path) -> None:
    """Of SGD the momentum too, without which it has no state."""
    mine = fixing(tmp_path, {"optimizer": {"kind": "sgd", "momentum": 0.0}})
    given = with_fixed(mine, frozenset())
    assert (given.optimizer, given.momentum) == ("sgd", 0.0)
    assert analyse(given).between.words == "8 Psi"


def test_an_optimizer_class_has_no_formula(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has an optimizer of its own"):
        with_fixed(fixing(tmp_path, {"optimizer": {"kind": "user"}}), frozenset())


def test_what_contradicts_the_config_is_not_simulated(tmp_path: Path) -> None:
    """A search or an advice could ask for it, and its command would be refused."""
    given = setup(tmp_path, CONFIG)
    with pytest.raises(UsageError, match=r"--microbatches 1: .* has 2"):
        analyse(replace(given, microbatches=1))
    limit = CUDA_CONTEXT + analyse(given).peak.total - 1
    device = analyse(given, limit=limit).device
    assert device is not None and device.tried
    assert not [one.command for one in device.tried if "--offload" in one.command]


def test_a_search_keeps_what_the_config_fixes(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    words = ["memory", "small_models:small", "--fit", "--device-memory", "4GiB", "--sequence", "5"]
    more = ["--batch", "2", "--world-size", "2", "--implementation", str(path)]
    done = CliRunner().invoke(main, [*words, *more, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=FitReport)
    assert report.rows and {row.microbatches for row in report.rows} == {2}


def test_an_option_that_the_config_repeats(tmp_path: Path) -> None:
    assert setup(tmp_path, CONFIG, microbatches=2).microbatches == 2


def test_a_config_that_offloads(tmp_path: Path) -> None:
    """Its moments and masters are on the host, and the bf16 weights of stage 2 on the device."""
    zero = {**ZERO, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    config = {**CONFIG, "zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {}}}
    given = setup(tmp_path, config)
    assert given.offload == "pinned" and given.case(3).sharding.offload == "pinned"
    report = analyse(given)
    assert report.host is not None and report.host.pinned > 0
    elements = sum(one.numel() for one in source("small_models:small").build().parameters())
    assert 0 <= report.host.peak.bytes["optimizer"] - 8 * elements / 2 <= 4 + 8 * 4
    assert 0 <= report.at_end("step", 1)["parameter"] - 2 * elements <= 2 * 3


def test_the_device_is_chosen_before_deepspeed_is_imported() -> None:
    """Else it says that it looked for one, on stdout, and takes what it finds."""
    code = "from zerocheck.contract.loading import load; load('deepspeed3')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
