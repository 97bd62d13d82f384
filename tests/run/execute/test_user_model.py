"""`--model`: the user's own model under each implementation."""

from __future__ import annotations

from pathlib import Path

import own_models
import pytest
from collected import RunsOf
from slices import sliced

from zerocheck.case.schema import Case, Model, UserModel, UserParameter
from zerocheck.catalogue import BUILT_IN
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import MEMORY
from zerocheck.run.execute.environment import environment
from zerocheck.run.findings.case_file import read, read_for_replay, write
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.journal import Journal
from zerocheck.run.records.records import CaseFile, Coverage, RunStarted
from zerocheck.run.records.tally import Tally
from zerocheck.run.replay import replay

GPT, CONV, MOE, ODD, RUNNING = (
    f"{own_models.__file__}:{name}" for name in ("gpt", "conv", "moe", "odd", "running")
)
SUBJECTS = Path(__file__).parents[1] / "subjects.py"


def holds(counted: Tally, *names: str) -> None:
    for name in names:
        cells = counted.implementations[name].cells
        assert not counted.findings_of(name)
        for obligation in ("ownership", "loss", "gradient", "update", "publish"):
            assert cells[obligation].status in ("holds", "known"), (name, obligation)  # type: ignore[index]


@pytest.mark.every(2)
@pytest.mark.parametrize("model", [GPT, CONV])
def test_all_built_in_implementations_hold(run: RunsOf, model: str) -> None:
    names = sliced(tuple(BUILT_IN), ("ddp", "fsdp1", "fsdp2", "zero3"))
    counted = run(*names, model=model)
    holds(counted, *names)
    for case in run.cases():
        assert case.model.user is not None and case.model.user.factory == model
    had = set(counted.implementations["zero3"].covered.exercised)
    assert ("tied" in had) == (model == GPT) and ("block-batch-norm" in had) == (model == CONV)


@pytest.mark.long
def test_experts_and_what_torch_refuses(run: RunsOf) -> None:
    holds(run("fsdp2", "zero3", "ddp", model=MOE), "fsdp2", "zero3", "ddp")
    counted = run("zero2", "fsdp2", model=ODD)
    holds(counted, "zero2")
    assert counted.implementations["fsdp2"].cases == {"unsupported": 1}  # one says why
    holds(run("zero1", model=RUNNING), "zero1")


def test_everything_but_the_model_is_drawn(run: RunsOf) -> None:
    counted = run("zero1", model=GPT, max_cases=12, world_sizes=(1, 2))
    cases = run.cases()
    assert len(cases) == len(set(cases)) == 12
    assert {case.world_size for case in cases} == {1, 2}
    for values in (
        {case.optimizer.amsgrad for case in cases},
        {case.start.step > 0 for case in cases},
        {case.training.microbatches > 1 for case in cases},
        {case.training.clip is None for case in cases},
        {case.data.loss_factor == 1.0 for case in cases},
        {case.data.rng for case in cases},
    ):
        assert len(values) == 2
    covered = counted.implementations["zero1"].covered
    assert covered.not_exercised["block-conv"] == f"the model is {GPT}"
    assert covered.not_exercised["batch-of-one"] == f"the model is {GPT}"


def test_a_fault_is_named_shrunk_and_replayed(run: RunsOf) -> None:
    name = f"{SUBJECTS}:not_averaged"
    counted = run(name, model=GPT, max_cases=4, shrink=True)
    (finding,) = counted.findings_of(name)
    assert finding.causes == ("gradient x W",)
    assert finding.model == GPT and finding.size == f"2 ranks, {GPT}, 1 step"
    assert "layers.0.qkv.weight" in str(finding.violation)
    path = Path(finding.case_file)
    with pytest.raises(UsageError, match=f"say so again to let its code run: --model {GPT}"):
        read_for_replay(path, implementation=name)
    file = read_for_replay(path, implementation=name, model=GPT)
    replayed = replay(file, implementation=name, model=GPT, ranks=run.pool)
    assert replayed is not None and replayed.exit_code == 1
    assert replayed.verdict.startswith("reproduced bit for bit: violated again")
    other = replay(file, implementation="fsdp2", model=CONV, ranks=run.pool)
    assert other is not None and other.exit_code == 0
    assert other.verdict.endswith("; the model is not that of the file: wte.weight differs")


def case_file(tmp_path: Path, model: Model) -> Path:
    """One that says that zero1 violated something."""
    file = CaseFile(
        implementation="zero1",
        case=Case(model=model),
        status="violated",
        judgement=None,
        environment=environment(),
    )
    return write(tmp_path, "given", file)


def test_a_case_without_a_model_of_the_users_takes_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave --model out"):
        read_for_replay(case_file(tmp_path, Model()), model=GPT)


def test_a_case_file_is_data(tmp_path: Path) -> None:
    """Reading one with a model of the user's imports nothing."""
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    user = UserModel(
        factory=f"{tmp_path / 'trap.py'}:make",
        parameters=(UserParameter(name="weight", shape=(2, 2)),),
    )
    path = case_file(tmp_path, Model(user=user))
    assert read(path).case.model.user == user
    with pytest.raises(UsageError, match="say so again"):
        read_for_replay(path)
    assert not (tmp_path / "imported").exists()


def test_buffers_are_not_asked_of_a_model_without_any(run: RunsOf, tmp_path: Path) -> None:
    counted = run("zero1", model=MOE)
    started = next(one for one in run.records if isinstance(one, RunStarted))
    assert started.without == {"buffers": f"{MOE} has no buffers"}
    assert "buffers" not in counted.implementations["zero1"].cells
    with Journal(tmp_path / "journal.ndjson") as journal:
        for record in run.records:
            journal.handle(record)
    run("zero1", model=MOE, reuse=(tmp_path,))
    again = next(one for one in run.records if isinstance(one, RunStarted))
    assert again.reused == again.planned and again.without == started.without
    assert again.sources.keys() == {MOE.rpartition(":")[0]}
    with pytest.raises(UsageError, match="has no buffers, so there is nothing to check"):
        run("zero1", model=MOE, obligations=("buffers",))


@pytest.mark.parametrize(
    ("model", "names"), [(CONV, ("ddp", "fsdp2", "zero3")), (ODD, ("ddp", "zero3"))]
)
def test_bytes_and_collectives(run: RunsOf, model: str, names: tuple[str, ...]) -> None:
    counted = run(*names, model=model, obligations=MEMORY, max_cases=1)
    for name in names:
        assert not counted.findings_of(name)
        for cell in counted.implementations[name].cells.values():
            assert cell.status == "holds"


def test_checkpoints(run: RunsOf) -> None:
    asked = ("roundtrip", "continuation", "export")
    counted = run("zero2", model=GPT, obligations=asked)
    assert not counted.findings_of("zero2")
    assert counted.implementations["zero2"].cells["roundtrip"].status == "holds"


def fixing(tmp_path: Path, fixed: object) -> str:
    path = tmp_path / "fixing.py"
    path.write_text(
        "from zerocheck.adapters.textbook.zero1 import Zero1\n"
        f"class Mine(Zero1):\n    fixed = {{'model': {fixed!r}}}\n"
    )
    return f"{path}:Mine"


def test_an_implementation_may_bring_the_model(run: RunsOf, tmp_path: Path) -> None:
    name = fixing(tmp_path, CONV)
    counted = run(name)
    holds(counted, name)
    assert all(case.model.user is not None for case in run.cases())
    coverage = next(one for one in run.records if isinstance(one, Coverage))
    assert coverage.model == CONV
    with pytest.raises(UsageError, match=r"has the model .* of its own"):
        run(name, model=GPT)


def test_a_model_beside_fixed_fields_of_drawn_ones(run: RunsOf, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fixes model\.tied, which only drawn models have"):
        run(fixing(tmp_path, {"tied": False}), model=GPT)


def test_what_cannot_be_judged_is_said_before_anything_runs(run: RunsOf) -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt'"):
        run("zero1", model=GPT.replace(":gpt", ":gptt"))
    with pytest.raises(UsageError, match="name the function that makes the model too"):
        RunOptions(model=own_models.__file__)
    assert not run.records
