"""`check.saved` and `check.loaded`: what is loaded on other ranks is what was saved."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from asking import Ask
from torch import nn

import zerocheck
from zerocheck.attached.record import digests
from zerocheck.attached.record.digests import digest_of, whole_of
from zerocheck.attached.session import _finish
from zerocheck.errors import UsageError, Violated
from zerocheck.protocol.observations import Entry

RIGHT = [
    ("fsdp2", 4, "fsdp2", 3),
    ("fsdp2", 2, "fsdp2", 2),
    ("fsdp2", 3, "ddp", 2),
    ("ddp", 2, "fsdp2", 4),
    ("fsdp1", 2, "fsdp1", 3),
    ("hybrid_fsdp2", 4, "fsdp2", 3),
    ("flat_fsdp1", 3, "flat_fsdp1", 2),
    ("compiled_ddp", 2, "plain", 1),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("saver", "savers", "loader", "loaders"), RIGHT)
def test_a_right_load_holds(
    ask: Ask, tmp_path: Path, saver: str, savers: int, loader: str, loaders: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    for answer in ask("save", savers, wrap=saver, folder=folder):
        assert answer["files"] == ["zerocheck.json"]
    for answer in ask("load", loaders, wrap=loader, folder=folder):
        assert (answer["wrong"], answer["said"]) == (0, "")
        assert answer["taken"] == 6 and answer["checked"] == [5, 6]
        assert "1 of 2 steps checked, all hold" in answer["summary"]
        assert "; 0 of 1 loads wrong" in answer["summary"]


# mistake: (role, part of the sentence, cause)
MISTAKES = {
    "nothing": ("parameter", "is not what was saved", "not loaded"),
    "model alone": ("exp_avg", "was saved, and is missing", "optimizer state lost"),
    "moments swapped": ("exp_avg", "holds the exp_avg_sq of the same", "moments swapped"),
    "moments rounded": ("exp_avg_sq", "was rounded to bf16", "rounded to bf16"),
    "moments zero": ("exp_avg", "of every parameter is 0", "moments lost"),
    "one row": ("parameter", "in part only: elements in [57, 60) differ", ""),
    "count": ("step", "is 0, and 4 was saved", "step count lost"),
    "rate": ("options", "lr of parameter group 0 is 0.003, and 0.01 was saved", ""),
    "buffers": ("buffer", "1.running_mean is 0", ""),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(ask: Ask, tmp_path: Path, mistake: str) -> None:
    """Saved by 4 ranks, loaded by 3."""
    role, sentence, cause = MISTAKES[mistake]
    folder = str(tmp_path / "checkpoint")
    ask("save", 4, folder=folder)
    answer = ask("load", 3, folder=folder, mistake=mistake)[0]
    assert answer["wrong"] == 1
    assert f"role {role}" in answer["said"] and sentence in answer["said"], answer["said"]
    assert f"  cause       {cause}" in answer["said"] or not cause
    assert "roundtrip: what is loaded is what was saved" in answer["said"]


def test_the_next_step_has_the_options_of_the_job_that_saved(ask: Ask, tmp_path: Path) -> None:
    """What a scheduler sets after the load is seen when the first step begins."""
    folder = str(tmp_path / "checkpoint")
    ask("save", 2, folder=folder, schedule=True)
    assert ask("load", 2, folder=folder)[0]["wrong"] == 0
    wrong = ask("load", 2, folder=folder, mistake="scheduler")[0]
    assert wrong["wrong"] == 1 and "1 of 1 loads wrong" in wrong["summary"]
    assert "cause       schedule not restored" in wrong["said"]
    assert "lr of parameter group 0 is 0.01, and it was 0.000625 when the job" in wrong["said"]
    meant = ask("load", 2, folder=folder, mistake="scheduler", options=False)[0]
    assert (meant["wrong"], meant["said"]) == (0, "")


def test_a_load_that_is_due_and_did_not_happen(ask: Ask, tmp_path: Path) -> None:
    """The script never says that it loaded: the first step does."""
    folder = str(tmp_path / "checkpoint")
    ask("save", 2, folder=folder)
    right = ask("load", 2, folder=folder, due=True)[0]
    assert (right["wrong"], right["said"], right["taken"]) == (0, "", 6)
    wrong = ask("load", 2, folder=folder, due=True, mistake="nothing")[0]
    assert wrong["wrong"] == 1 and "  cause       not loaded" in wrong["said"], wrong["said"]


def test_copies_that_differ(ask: Ask, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ask("save", 2, wrap="ddp", folder=folder)
    answer = ask("load", 3, wrap="ddp", folder=folder, mistake="copy")[0]
    assert "is another on rank 1 than on the first rank that has it" in answer["said"]
    assert "  cause       copies differ" in answer["said"]


def test_it_is_raised_on_every_rank(ask: Ask, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ask("save", 2, folder=folder)
    for answer in ask("load", 2, folder=folder, mistake="moments zero", warn=False):
        assert answer["raised"] == "Violated"
        assert answer["said"].startswith(f"{folder}: roundtrip: exp_avg of every parameter is 0")


def test_the_position_in_the_data(ask: Ask, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ask("save", 4, folder=folder)
    right, wrong = {"epoch": 0, "samples": 80}, {"epoch": 0, "samples": 0}
    assert ask("load", 3, folder=folder, data=right)[0]["wrong"] == 0
    said = ask("load", 3, folder=folder, data=wrong)[0]["said"]
    assert "the position in the data is {'epoch': 0, 'samples': 0}" in said


def test_random_states(ask: Ask, tmp_path: Path) -> None:
    """Of as many ranks; on another number there is nothing to compare."""
    folder = str(tmp_path / "checkpoint")
    ask("save", 2, folder=folder)
    assert ask("load", 2, folder=folder, random=True)[0]["wrong"] == 0
    said = ask("load", 2, folder=folder, mistake="random", random=True)[0]["said"]
    assert "the random state of torch on rank 0 is none that was saved" in said
    assert "  cause       random state not loaded" in said
    assert ask("load", 3, folder=folder, mistake="random", random=True)[0]["wrong"] == 0


def attached(tmp_path: Path) -> zerocheck.Attached:
    model = nn.Linear(3, 2)
    return zerocheck.attach(model, torch.optim.AdamW(model.parameters()), directory=tmp_path / "k")


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = attached(tmp_path)
    with pytest.raises(UsageError, match=r"there is no .*zerocheck\.json: check\.saved"):
        check.loaded(tmp_path)
    check.saved(tmp_path / "none")
    _finish(weakref.ref(check))
    assert "no record of what was saved: " in capsys.readouterr().err
    (tmp_path / "zerocheck.json").write_text('{"saved": 1}')
    with pytest.raises(UsageError, match="is no record of a saved state"):
        check.loaded(tmp_path)
    check.saved(tmp_path)
    text = (tmp_path / "zerocheck.json").read_text()
    (tmp_path / "zerocheck.json").write_text(text.replace('"saved":1', '"saved":7'))
    with pytest.raises(UsageError, match="format 7; this zerocheck knows format 1"):
        check.loaded(tmp_path)


def test_another_model(tmp_path: Path) -> None:
    attached(tmp_path).saved(tmp_path)
    model = nn.Linear(4, 2)
    other = zerocheck.attach(model, torch.optim.AdamW(model.parameters()), directory=tmp_path)
    with pytest.raises(Violated, match=r"weight has another shape than was saved: \[2, 4\]"):
        other.loaded(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_a_digest_does_not_depend_on_the_sharding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (torch.randn(7, 5, 4) > 0.3) if dtype is torch.bool else torch.randn(7, 5, 4).to(dtype)
    shape = (7, 5, 4)
    one = whole_of([digest_of(whole, Entry("w", shape, 0, 140))])
    flat = [
        digest_of(whole.view(-1)[low:high], Entry("w", shape, low, high))
        for low, high in ((0, 33), (33, 90), (90, 140))
    ]
    monkeypatch.setitem(digests.CHUNK, "cpu", 11)
    boxes = [
        digest_of(whole[:, low:high], Entry("w", shape, 0, 28 * (high - low), (rows, cut, last)))
        for low, high in ((0, 2), (2, 5))
        for rows, cut, last in [((0, 7), (low, high), (0, 4))]
    ]
    assert one == whole_of(flat) == whole_of(boxes) == whole_of([*flat, *flat])
    assert whole_of(flat[:2]) is None


def test_a_digest_depends_on_each_bit_and_place() -> None:
    whole = torch.randn(64)
    entry = Entry("w", (64,), 0, 64)
    found = {digest_of(whole, entry).total}
    for place in range(64):
        for bit in (0, 31):
            other = whole.clone()
            other.view(torch.int32)[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            found.add(digest_of(other, entry).total)
    found.add(digest_of(whole.flip(0), entry).total)
    found.add(digest_of(whole[torch.randperm(64)], entry).total)
    assert len(found) == 1 + 128 + 2


@pytest.mark.long
def test_right_epochs_hold(ask: Ask) -> None:
    """Two epochs on 3 ranks, with 5 % of the samples copies of others."""
    for answer in ask("epochs", 3, folder="", copies=36):
        assert answer == {"said": "", "wrong": 0, "taken": 120}


def test_a_sample_that_is_used_twice_in_a_step(ask: Ask) -> None:
    """Two calls of the model with one batch, as R-Drop makes them."""
    answer = ask("epochs", 2, folder="", mistake="none, twice", count=1)[0]
    assert (answer["wrong"], answer["said"]) == (0, "")


@pytest.mark.long
def test_the_same_samples_on_all_ranks(ask: Ask) -> None:
    answer = ask("epochs", 2, folder="", mistake="no sampler", batch=8)[0]
    assert answer["wrong"] > 0 and answer["said"].count("VIOLATED") == 1
    assert "ranks 0, 1 are given the same ones" in answer["said"]
    assert "  cause       samples of another rank" in answer["said"]


@pytest.mark.long
def test_ranks_that_share_samples(ask: Ask) -> None:
    """As those of a tensor-parallel group do."""
    answer = ask("epochs", 2, folder="", mistake="no sampler", data_ranks=1, batch=8)[0]
    assert (answer["wrong"], answer["said"]) == (0, "")


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("batch", [2, 8])
def test_a_job_of_four_ranks_resumed_on_three(ask: Ask, tmp_path: Path, batch: int) -> None:
    """240 of 719 samples were given; a loader that begins anew gives them again."""
    folder = str(tmp_path / "checkpoint")
    saved = ask("epochs", 4, folder=folder, saves=240 // (4 * batch), batch=batch)
    assert saved[0]["wrong"] == 0 and (tmp_path / "checkpoint" / "zerocheck.json").is_file()
    right = ask("epochs", 3, folder=folder, resumes=True, batch=batch)
    assert {one["wrong"] for one in right} == {0}
    wrong = ask("epochs", 3, folder=folder, resumes=True, mistake="from the first", batch=batch)[0]
    assert wrong["wrong"] > 0
    first = saved[0]["taken"] + 1
    assert f"of steps {first} to " in wrong["said"], wrong["said"]
    assert "were given before in this epoch" in wrong["said"]
    assert "the data begins anew after the load" in wrong["said"]
    assert "  cause       data position lost" in wrong["said"]


@pytest.mark.parametrize("given", [-1, "1", None, True])
def test_no_epoch(tmp_path: Path, given: object) -> None:
    with pytest.raises(UsageError, match=r"epoch is .* \(allowed: an int from 0 on\)"):
        attached(tmp_path).epoch(given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"data_ranks is 2 \(allowed: what divides 1 ranks\)"):
        attached(tmp_path).epoch(0, data_ranks=2)


def test_inputs_that_cannot_be_read(ask: Ask) -> None:
    """The training goes on, and no further step is checked."""
    for answer in ask("samples_that_fail"):
        assert answer.get("taken") == 3, answer
    assert "RuntimeError: not to be looked at. No step is checked from here on" in answer["message"]
