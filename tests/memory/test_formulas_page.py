"""Figures of docs/formulas.md, against the formulas and the libraries that they are about."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from zerocheck.memory.formulas import recipe, redundancy, saved_share, total, words

PAGE = (Path(__file__).parents[2] / "docs" / "formulas.md").read_text()
MIXED, FP32 = recipe("mixed"), recipe("fp32")
B = 10**9
EIGHT = {stage: float(total(7 * B, 8, stage, FP32)) / B for stage in range(4)}


def row(start: str) -> list[str]:
    """Return the cells of the row of the page that begins so."""
    (line,) = [one for one in PAGE.splitlines() if one.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("stage", range(4))
def test_formulas_of_the_stages(stage: int) -> None:
    _, mixed, fp32 = row(f"{stage} | ")
    assert mixed.replace("Ψ", "Psi") == words(stage, MIXED)
    assert fp32.replace("Ψ", "Psi") == words(stage, FP32)


@pytest.mark.parametrize(
    ("start", "here"),
    [
        ("ZeRO paper, figure 1 | 7.5B, N = 64, data", total(7_500_000_000, 64, 0)),
        ("ZeRO paper, figure 1 | the same, stage 1", total(7_500_000_000, 64, 1)),
        ("ZeRO paper, figure 1 | the same, stage 2", total(7_500_000_000, 64, 2)),
        ("ZeRO paper, figure 1 | the same, stage 3", total(7_500_000_000, 64, 3)),
        ("ZeRO paper, table 1 | 128B, N = 16, stage 1", total(128 * B, 16, 1)),
        ("ZeRO paper, table 1 | 128B, N = 16, stage 2", total(128 * B, 16, 2)),
        ("ZeRO paper, table 1 | 128B, N = 16, stage 3", total(128 * B, 16, 3)),
        ("ZeRO paper, table 1 | 1T, N = 1024, stage 3", total(1000 * B, 1024, 3)),
        ("DeepSpeed's estimator (0.19.8) | 2.851B", total(2_851_000_000, 8, 2)),
        ("DeepSpeed's estimator (0.19.8) | the same", total(2_851_000_000, 8, 3)),
    ],
)
def test_published_figures(start: str, here: float) -> None:
    _, _, published, ours, ratio, _ = row(start)
    size = float(here) / B
    assert ours == f"{size:.4g} GB" or ours == f"{size:.2f} GB"
    assert ratio == f"{size / float(published.removesuffix(' GB')):.2f}"


def test_figures_of_deepspeeds_estimators() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    elements = 2_851_000_000
    _, two = zero.estimate_zero2_model_states_mem_needs(elements, 8, 1, cpu_offload=False)
    _, three, _ = stage3.estimate_zero3_model_states_mem_needs(
        elements, 32_000_000, 8, 1, cpu_offload=False, cpu_offload_params=False
    )
    assert row("DeepSpeed's estimator (0.19.8) | 2.851B")[2] == f"{two / B:.2f} GB"
    assert row("DeepSpeed's estimator (0.19.8) | the same")[2] == f"{three / B:.2f} GB"


def test_figures_of_tutorials() -> None:
    assert [EIGHT[stage] for stage in range(4)] == [112, 63, 38.5, 14]
    assert "112, 63, 38.5, 14 GB" in row("tutorials")[2]
    assert "1,120 GB for 70B" in PAGE and total(70 * B, 1, 0) == 1120 * B
    _, saved = row("stage 1 saves 50 %")
    shares = [float(100 * saved_share(8, stage, FP32)) for stage in (1, 2, 3)]
    assert re.findall(r"[\d.]+(?= %)", saved) == ["43.75", "65.6", "87.5"]
    assert shares == [43.75, 65.625, 87.5]
    times = [112 / EIGHT[stage] for stage in (1, 2, 3)]
    assert [f"{one:.3g}" for one in times] == ["1.78", "2.91", "8"]
    assert "1.78, 2.91 and 8 times" in row("stages save")[1]
    copies = [float(redundancy(8, stage, FP32)) for stage in range(4)]
    assert copies == [8, 4.5, 2.75, 1]
    assert "8, 4.5, 2.75 and 1" in row("redundancy is")[1]
    assert FP32.states == 2 * FP32.parameter and MIXED.states == 6 * MIXED.parameter


def test_snippets_that_do_not_run() -> None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    with pytest.raises(AttributeError):
        torch.distributed.fsdp.FullyShardedDataParallel.BackwardPrefetch  # noqa: B018
    assert torch.distributed.fsdp.BackwardPrefetch.BACKWARD_PRE
    with pytest.raises(TypeError):
        size_based_auto_wrap_policy(min_num_params=1)  # type: ignore[call-arg]
