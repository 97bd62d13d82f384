"""Every command of README and docs runs, as it stands there but for fewer cases.

Those in `shell` blocks are typed by tests/test_sessions.py; here their options are tried.

Those that need what is not here stand in ELSEWHERE, by name and with the reason; of them, and of
those that only `tox -e conformance` runs, the options are tried. A command that stands in neither
table fails the test, and so does a row that no page shows any more.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from documents import (
    PAGES,
    README,
    ROOT,
    arguments,
    blocks,
    commands,
    example,
    inline,
    typed_commands,
)
from slices import WHOLE
from torch.distributed.run import parse_args

import zerocheck
from zerocheck.cli import main as program
from zerocheck.errors import UsageError
from zerocheck.run.plan.options import RunOptions, parse_obligations
from zerocheck.run.plan.settings import parse_world_sizes


class Row(NamedTuple):
    """How a command is run. more: options that make it short; code: it exits with; said: it prints;
    whole: only `tox -e conformance` runs it."""

    more: str = ""
    code: int = 0
    message: str = ""
    whole: bool = True


FEW = "--world-sizes 1,2 --max-cases 2 --obligations gradient,update"
RESUMED = "--world-sizes 1,2 --max-cases 12 --obligations roundtrip,continuation"
ALL_HOLD = "all obligations hold. "
NOTHING_NEW = "no new finding. "
"""Where listed faults of torch show up."""
OWN = "zerocheck run my_sharding.py:my_fsdp"
LEFT_OUT = Row("--world-sizes 1,2 --max-cases 6", code=1, message="pairs of features were left out")
"""A covering array that is cut short fails the run, and says so."""

RUN = {
    "zerocheck run tests/field/torch_defaults.py:fsdp2 --world-sizes 1,2,3": Row(
        FEW, message=ALL_HOLD
    ),
    f"{OWN} --feature hosts": Row(
        "--world-sizes 2,3 --max-cases 8 --obligations gradient,update", message=ALL_HOLD
    ),
    f"{OWN} --obligations equivalence,resume": Row(RESUMED, message=ALL_HOLD),
    f"{OWN} --obligations export,roundtrip,continuation --feature resume-fewer --world-sizes 6,8": (
        Row("--max-cases 6", message=ALL_HOLD)
    ),
    "zerocheck run fsdp2 zero3 --obligations resume": Row(RESUMED, message=NOTHING_NEW),
    "zerocheck run fsdp2 --profile ci": LEFT_OUT,
    f"{OWN} --report-dir before": Row(FEW, message=ALL_HOLD),
    f"{OWN} --report-dir now": Row(FEW, message=ALL_HOLD),
    f"{OWN} --shard 1/2 --report-dir shards/1": Row(FEW, message="shard 1/2: all obligations hold"),
    f"{OWN} --shard 2/2 --report-dir shards/2": Row(FEW, message="shard 2/2: all obligations hold"),
    f"{OWN} --reuse shards": Row(FEW, message="2 of 2 cases were judged by other runs"),
    "zerocheck report now --against before": Row(message="nothing is newly violated"),
    "zerocheck list": Row(message="obligations", whole=False),
    "zerocheck faults --list": Row(message="gather-stale", whole=False),
    "zerocheck faults average-becomes-sum": Row(message="caught"),
    "zerocheck memory --tables": Row(message="7B in fp32 on 8 ranks"),
    "zerocheck memory llama3-8b --implementation fsdp2 --world-size 8 --batch 2 --sequence 8192 "
    "--checkpoint-activations": Row(message="40.910 GiB"),
    "zerocheck memory llama-8b --implementation fsdp2 --world-size 8 --sequence 2048 --exact": Row(
        message="33.840 GiB, of which 7.344 GiB lie unused"
    ),
    "zerocheck memory llama-70b --world-size 256 --tensor-parallel 8 --batch 16 --sequence 8192 "
    "--checkpoint-activations": Row(message="peak: 57.137 GiB"),
    "zerocheck memory llama-70b --world-size 64 --tensor-parallel 8 --checkpoint-activations": Row(
        message="16 Psi/N, N = 8, Psi = 8,820,367,360 of a rank"
    ),
    "zerocheck memory llama-8b --offload pinned --world-size 2 --sequence 4096 "
    "--checkpoint-activations --device-memory 24GiB": Row(message="it takes 64.873 GiB"),
    "zerocheck memory llama-13b --implementation fsdp2 --world-size 8 --batch 4 --sequence 2048 "
    "--device-memory 40GiB": Row(code=1, message="OUT OF MEMORY at 40.000 GiB"),
    "zerocheck memory gpt2 --implementation deepspeed2 --world-size 8": Row(
        message="2 Psi + 14 Psi/N"
    ),
    "zerocheck memory gpt2 --implementation ds_config.json --world-size 8": Row(message="bucket"),
    "zerocheck memory gpt2 --fit --device-memory 4GiB --implementation deepspeed3 --world-size "
    "8": Row(message="take deepspeed3"),
    "zerocheck checkpoint checkpoints/step-100": Row(whole=False),
    "zerocheck checkpoint checkpoints/step-100 other/step-100": Row(message="equal", whole=False),
    "pytest test_my_cases.py --hypothesis-show-statistics": Row(
        "-p no:cacheprovider", message="clip: not exercised"
    ),
    "pytest test_my_checks.py --hypothesis-seed 1": Row(
        "-p no:cacheprovider --hypothesis-profile few", message="2 passed"
    ),
    "torchrun --nproc-per-node 2 train.py": Row(message="3 of 10 steps checked, all hold"),
    f"torchrun --nproc-per-node 4 -m {OWN}": Row("--max-cases 2"),
}

ON_HOSTS = (
    "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint host-a:29400 "
    f"-m {OWN}"
)
NETWORK = "installs from the network: .ci/run and tests/test_sessions.py types it"
GPU = "needs a GPU: tests/gpu"

ELSEWHERE = {
    "pip install --upgrade torch": NETWORK,
    ON_HOSTS: "needs two hosts: tests/ranks/test_two_hosts.py makes them",
    f"{OWN} --device cuda": GPU,
    f"torchrun --nproc-per-node 4 -m {OWN} --device cuda": GPU,
    "zerocheck run titan.py:recipe titan.py:mixed --model titan_model.py:small --world-sizes 2,3": (
        "needs torchtitan and triton (200 MB): tests/field/test_torchtitan.py, by tox -e field"
    ),
    "zerocheck compare one/recorder/step-1 other/recorder/step-1 --model my_model.py:make_model": (
        "needs two jobs: tests/attached/test_attach_comparison.py takes the steps"
    ),
    "zerocheck faults --implementation my_sharding.py:my_fsdp": "takes minutes: "
    "tests/faults/test_injections.py runs each of them",
    "zerocheck memory llama3-8b --fit --device-memory 80GiB --world-size 8": "takes a minute: "
    "tests/memory/test_fit_search.py searches small models",
    "zerocheck memory mixtral-8x7b --world-size 64 --expert-parallel 8 --checkpoint-activations": (
        "takes 16 s: tests/memory/test_divided.py divides small models"
    ),
    "zerocheck memory llama-8b --world-size 16 --pipeline-parallel 4 --microbatches 8 "
    "--no-reshard": "takes half a minute: tests/memory/test_divided.py divides small models",
    "zerocheck memory gpt2 --fit --device-memory 80GiB --world-size 8 --link 50GB/s --flops 400T": (
        "takes half a minute: tests/cli/test_cli_memory.py searches a small model"
    ),
    "zerocheck memory config.json --implementation ds_config.json --world-size 8 --sequence 2048 "
    "--device-memory 24GB": "takes minutes with a large config.json: "
    "tests/memory/test_running_out.py tries alternatives of small models",
    "zerocheck replay zerocheck-report/findings/FINDING.json --implementation "
    "my_sharding.py:my_fsdp": "any finding: tests/cli/test_cli_torchrun.py replays one",
    "zerocheck replay zerocheck-report/findings/fsdp2-update-parameter-never-updated.json "
    "--script show.py": "that finding is not here: tests/script runs such scripts",
}

SHOWN = {command: page for page in PAGES for command in commands(page)}


def test_every_command_is_run_or_says_why_not() -> None:
    assert not RUN.keys() & ELSEWHERE.keys()
    assert {*RUN, *ELSEWHERE} == SHOWN.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With the files that the pages show, and two checkpoints of one state."""
    path = tmp_path_factory.mktemp("reader")
    shown = ("my_sharding.py", "my_model.py")
    tests = ("test_my_sharding.py", "test_my_cases.py", "test_my_checks.py")
    for name in (*shown, *tests, "train.py"):
        (path / name).write_text(example(name))
    few = "from hypothesis import settings\nsettings.register_profile('few', max_examples=4)\n"
    (path / "conftest.py").write_text(few)
    (path / "tests").mkdir()
    (path / "tests" / "field").symlink_to(ROOT / "tests" / "field")
    (path / "ds_config.json").write_text(example("ds_config.json"))
    model = torch.nn.Linear(3, 2)
    for name in ("checkpoints", "other"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is one process
            dcp.save({"model": model.state_dict()}, checkpoint_id=path / name / "step-100")
    before = Path.cwd()
    os.chdir(path)
    yield path
    os.chdir(before)


def typed(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a command. zerocheck itself runs here, which spares imports."""
    name, *words = shlex.split(command)
    if name == "zerocheck":
        done = CliRunner().invoke(program, words, catch_exceptions=False)
        return done.exit_code, done.output
    module = {"torchrun": "torch.distributed.run", "pytest": "pytest"}[name]
    path = [str(folder), str(Path(zerocheck.__file__).parent.parent), str(ROOT / "reference")]
    ran = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ":".join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("command", [c for c, row in RUN.items() if WHOLE or not row.whole])
def test_commands_run(command: str, folder: Path) -> None:
    row = RUN[command]
    if "ds_config.json" in command:
        pytest.importorskip("deepspeed")
    for number in (1, 2) if "--reuse shards" in command else ():
        typed(f"{OWN} --shard {number}/2 --report-dir shards/{number} {FEW}", folder)
    if "report now" in command:
        for of in ("before", "now"):
            typed(f"{OWN} --report-dir {of} {FEW}", folder)
    code, message = typed(f"{command} {row.more}", folder)
    assert code == row.code, message
    assert row.message in message, message


TYPED = [command for page in PAGES for command in typed_commands(page)]


@pytest.mark.parametrize("command", [c for c in (*SHOWN, *TYPED) if "zerocheck" in c.split()])
def test_options_are_taken(command: str) -> None:
    if command.startswith("torchrun"):
        parse_args(shlex.split(command)[1:])
    taken(arguments(command))


@pytest.mark.parametrize(
    ("page", "command"), [(page, command) for page in PAGES for command in inline(page)]
)
def test_options_within_a_sentence_are_taken(page: Path, command: str) -> None:
    taken(arguments(command))


def taken(words: list[str]) -> None:
    """Raises where zerocheck has no such command, option, name of a feature or of a set."""
    name, *rest = words
    given = program.commands[name].make_context(name, rest).params
    if name == "run":
        RunOptions(
            implementations=tuple(given["implementations"]),
            profile=given["profile"] or "quick",
            features=tuple(given["features"]),
            world_sizes=parse_world_sizes(given["world_sizes"] or "2"),
            obligations=parse_obligations(given["obligations"] or "equivalence"),
        )


@pytest.mark.parametrize(
    "wrong", ["run --sead 1", "run --feature hots", "run --profile cy", "run --obligations grad"]
)
def test_a_wrong_option_is_seen(wrong: str) -> None:
    with pytest.raises((click.UsageError, UsageError)):
        taken(wrong.split())


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    """Python, TOML and JSON parse, and files have a name; the rest is output, or has a test of its
    own: yaml in test_ci_docs.py, bash in test_readme.py, shell in test_sessions.py."""
    for page in PAGES:
        for language, text in blocks(page):
            kinds = ("python", "toml", "json", "text", "yaml", "bash", "shell")
            assert language in kinds, (page.name, text)
            if language == "json":
                json.loads(text)
            if language == "toml":
                tomllib.loads(text)
            if language == "python":
                assert re.match(r"# [\w/]+\.py\n", text), (page.name, text)
                compile(text, page.name, "exec")


EVERY = sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("reports/**/*.md")})


@pytest.mark.parametrize("page", EVERY, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that is there, and to a heading that it has."""
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            assert heading in anchors(target), link


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_linked_from_a_page_that_readers_begin_with() -> None:
    """README has at most 700 words, outputs among them; `guide.md` has all pages."""
    start, guide = README.read_text(), (ROOT / "docs" / "guide.md").read_text()
    assert len(start.split()) <= 700
    texts = start, guide.replace("](", "](docs/"), (ROOT / "CONTRIBUTING.md").read_text()
    assert all(any(f"(docs/{page.name}" in text for text in texts) for page in PAGES[1:])
