"""What scripts look like, and which are refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from hand_made import HOSTILE
from making import case_file, in_scripts, known, script

from zerocheck.case.drawing import draw
from zerocheck.case.schema import Case
from zerocheck.case.shapes import parameter_shapes
from zerocheck.cli import main
from zerocheck.contract.loading import load
from zerocheck.errors import UsageError
from zerocheck.protocol.verdicts import MEMORY, Judgement
from zerocheck.run.known_issues.entries import ours
from zerocheck.run.records.journal import encode
from zerocheck.run.records.records import CaseFile
from zerocheck.script import LONGEST, script_of, scripts

CONFIGURATION = Path(__file__).parent.parent.parent / "pyproject.toml"


def drawn(count: int) -> list[tuple[str, Case]]:
    """Cases of every kind, with an implementation that runs them."""
    names = list(scripts())
    found = []
    for number, case in enumerate(draw(count, seed=3, world_sizes=(1, 2, 3))):
        name = names[number % len(names)]
        if load(name).supports(case) is None:
            found.append((name, case))
    return found


def scripts_of_drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, str]]:
    monkeypatch.setattr("zerocheck.script.write.LONGEST", 10_000)
    found = []
    for name, case in drawn(240):
        file = msgspec.structs.replace(case_file(name, None), case=case)
        with suppress(UsageError):
            found.append((case, script_of(file)))
    assert len(found) > 60
    return found


def test_scripts_pass_ruff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [script_of(known(issue)) for issue in in_scripts()]
    texts += [text for _, text in scripts_of_drawn(monkeypatch)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text(CONFIGURATION.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--ignore=E501", "--no-cache", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_model_has_the_parameters_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, text in scripts_of_drawn(monkeypatch):
        names: dict[str, object] = {"__name__": "script"}
        exec(compile(text, "script", "exec"), names)
        model = names["build"]()  # type: ignore[operator]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert list(shapes.items()) == list(parameter_shapes(case.model).items())
        microbatch = () if case.training.microbatches == 1 else (0,)
        losses = [names["loss_of"](model, 0, 1, *microbatch) for _ in range(2)]  # type: ignore[operator]
        assert torch.equal(losses[0], losses[1]) and losses[0].isfinite()


def test_known_issues_of_torch_fit() -> None:
    assert len(in_scripts()) > 20
    for issue in in_scripts():
        assert script_of(known(issue)).count("\n") <= LONGEST, issue.fingerprint


def test_no_script_saves_and_loads() -> None:
    resumed = [issue for issue in ours() if issue.case is not None and issue.case.resume]
    assert resumed
    for issue in resumed:
        with pytest.raises(UsageError, match=r"cannot show|saves and loads|needs deepspeed"):
            script_of(known(issue))


def test_no_script_has_two_axes() -> None:
    replicated = [issue for issue in ours() if issue.case is not None and len(issue.case.mesh) > 1]
    assert replicated
    for issue in replicated:
        with pytest.raises(UsageError, match=r"cannot show|the mesh has 2 axes"):
            script_of(known(issue))


def test_no_script_needs_a_library_that_is_not_torch() -> None:
    foreign = [issue for issue in ours() if issue.implementation.startswith("deepspeed")]
    foreign = [issue for issue in foreign if issue.case is not None]
    assert foreign
    for issue in foreign:
        with pytest.raises(UsageError, match="needs deepspeed"):
            script_of(known(issue))


def test_no_script_measures() -> None:
    measured = [issue for issue in ours() if issue.obligation in MEMORY]
    assert measured
    for issue in measured:
        with pytest.raises(UsageError, match=f"cannot show that '{issue.obligation}'"):
            script_of(known(issue))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("zero2", {}, "zero2 is zerocheck's own code"),
        ("zerocheck.faults.article:ArticleStage1", {}, "is zerocheck's own code"),
        ("ddp+rank-left-out", {}, "an injected fault is not written as a script"),
        ("ddp", {"training": {"loss_scale": 2.0, "overflow": 1}}, "(training.overflow)"),
        ("my.py:build", {"training": {"loss_scale": 2.0}}, "your code (training.loss_scale)"),
        ("my.py:build", {"training": {"unfreeze": 1}}, "code which (training.unfreeze)"),
        ("ddp", {"resume": [{"mesh": [2]}]}, "saves and loads a checkpoint (resume)"),
        ("ddp", {"disturbance": {"delay": 1.0}}, "(disturbance.delay)"),
        ("ddp", {"model": {"blocks": [{"kind": "mlp", "dtype": "bf16"}]}}, "bf16 parameters"),
        (
            "ddp",
            {"model": {"user": {"factory": "m.py:f", "parameters": [{"name": "w", "shape": [2]}]}}},
            "the model is the user's own (model.user)",
        ),
        (
            "ddp",
            {"model": {"blocks": [{"kind": kind} for kind in ("attention", "experts", "conv")]}},
            f"lines, {LONGEST} are allowed: the case has 3 blocks (attention, conv, experts)",
        ),
    ],
)
def test_refusals_name_what_is_in_the_way(
    name: str,
    fields: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def build(model, case, mesh):\n    return None\n")
    with pytest.raises(UsageError) as refused:
        script(name, **fields)
    assert message in str(refused.value)


def test_of_several_violations_the_title_says_which() -> None:
    file = case_file("ddp", "gradient")
    other = case_file("ddp", "update", step=1, title="AdamW is wrong").judgement
    assert file.judgement is not None and other is not None
    both = Judgement(statuses={}, violations=(*file.judgement.violations, *other.violations))
    for title, message in (("AdamW is wrong", "parameter"), ("not told", "gradient of")):
        text = script_of(msgspec.structs.replace(file, judgement=both, title=title))
        assert f'rank {{rank}}, {message}", expected' in text


def test_an_obligation_that_no_script_shows() -> None:
    with pytest.raises(UsageError, match="cannot show that 'ownership' is violated"):
        script("fsdp2", "ownership")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "has no function mine"),
        ("class mine: pass", "a class needs zerocheck"),
        ("def mine(:", "cannot be read"),
        ("from zerocheck import Built\ndef mine(m, c, mesh): ...", "imports zerocheck.Built"),
        ("import zerocheck\ndef mine(m, c, x): zerocheck.grouped(m)", "uses zerocheck.grouped"),
        ("def mine(m, c, mesh): return Built(m, 1)\nmine.semantics = 1", "declares semantics"),
        (
            "import zerocheck\ndef mine(m, c, mesh): return zerocheck.Built(m, 1, clip=2)",
            "gives Built more than a model and an optimizer",
        ),
    ],
)
def test_users_code_that_needs_zerocheck(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "code.py").write_text(source.replace("return Built", "return zerocheck.Built"))
    with pytest.raises(UsageError) as refused:
        script(f"{tmp_path}/code.py:mine")
    assert message in str(refused.value)


def test_what_is_offloaded_is_in_the_script() -> None:
    text = script_of(case_file("fsdp2", sharding={"offload": "pageable"}))
    assert "offload = CPUOffloadPolicy(pin_memory=False)" in text
    assert text.count(", offload_policy=offload)") == text.count("fully_shard(") > 0
    assert "CPUOffloadPolicy, fully_shard" in text
    assert "ffload" not in script_of(case_file("fsdp2"))


def test_a_case_file_brings_no_code_with_it() -> None:
    title = f'{HOSTILE} """\nimport os\nos.abort()\n"""\\'
    text = script("ddp", title=title)
    plain = script("ddp", title="plain")
    assert [line for line in text.splitlines() if line.startswith("import")] == [
        line for line in plain.splitlines() if line.startswith("import")
    ]
    compile(text, "script", "exec")
    hostile = '*"\n\\x'
    groups = {"groups": [{"pattern": hostile, "lr": 0.5}, {}]}
    names: dict[str, object] = {"__name__": "script"}
    exec(compile(script("ddp", optimizer=groups), "script", "exec"), names)
    assert hostile in names["OPTIONS"]  # type: ignore[operator]


def written(folder: Path, file: CaseFile) -> str:
    (folder / "case.json").write_bytes(encode(file))
    return str(folder / "case.json")


def test_the_command_line(tmp_path: Path) -> None:
    case = written(tmp_path, case_file("fsdp2"))
    printed = CliRunner().invoke(main, ["replay", case, "--script", "-"])
    assert printed.exit_code == 0 and printed.stdout == script("fsdp2")
    target = tmp_path / "script.py"
    for _ in range(2):  # what zerocheck wrote may be written again
        done = CliRunner().invoke(main, ["replay", case, "--script", str(target)])
        assert done.exit_code == 0 and "exits with 1 while the fault is there" in done.stdout
    assert target.read_text() == script("fsdp2")
    target.write_text("precious = 1\n")
    done = CliRunner().invoke(main, ["replay", case, "--script", str(target)])
    assert done.exit_code == 2 and "was not written by zerocheck" in done.stderr
    assert target.read_text() == "precious = 1\n"
    other = ["replay", case, "--script", "-", "--implementation", "ddp"]
    assert "DistributedDataParallel(build())" in CliRunner().invoke(main, other).stdout
    fault = written(tmp_path, case_file("fsdp2+gather-stale"))
    done = CliRunner().invoke(main, ["replay", fault, "--script", "-"])
    assert done.exit_code == 2 and "an injected fault is not written as a script" in done.stderr
    right = ["replay", fault, "--script", "-", "--implementation", "fsdp2"]
    done = CliRunner().invoke(main, right)
    assert done.exit_code == 0 and "the case in which fsdp2+gather-stale failed" in done.stdout


def test_code_that_only_the_file_names_is_not_read(tmp_path: Path) -> None:
    case = written(tmp_path, case_file(f"{tmp_path}/mine.py:mine"))
    done = CliRunner().invoke(main, ["replay", case, "--script", "-"])
    assert done.exit_code == 2 and "say so again to let its code run" in done.stderr
