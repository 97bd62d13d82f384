"""`zerocheck memory`: what it shows, and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from zerocheck.cli import main
from zerocheck.cli.memory import memory, named
from zerocheck.cli.output import ProgressLines
from zerocheck.memory.fit.result import FitReport
from zerocheck.memory.result import MemoryReport

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

def with_batches():
    def batch(generator):
        tokens = torch.randint(10, (1, 5), generator=generator)
        return tokens, tokens
    def loss(outputs, target):
        return nn.functional.cross_entropy(outputs.flatten(0, 1).float(), target.flatten())
    return net(), batch, loss

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 4)
    def forward(self, tokens):
        return self.inside(tokens)

def odd():
    return Odd()
"""


FITS = ("gpt2", "--fit", "--device-memory", "80GiB")


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["memory", *map(str, args)])


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "my_net.py"
    path.write_text(MODEL)
    return f"{path}:net"


def test_a_model_of_the_users(model: str, tmp_path: Path) -> None:
    result = invoke(model, "--world-size", 3, "--sequence", 5, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "90 parameters in 3 tensors" in result.output
    assert "peak:" in result.output and "between steps:" in result.output
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=MemoryReport)
    assert report.elements == 90 and report.world_size == 3
    # Rows on 3 ranks: 10 are 4, for the weights of both and the bias.
    assert report.between.held == 16 * (4 * 4 + 4 * 4 + 4) + 3 * 4


def test_the_function_that_run_takes_is_taken(model: str) -> None:
    alone = invoke(model, "--sequence", 5)
    name = model.replace(":net", ":with_batches")
    both = invoke(name)
    assert both.exit_code == 0, both.output
    said = both.output.replace(":with_batches", ":net").replace("inputs (1, 5)", "1 x 5 positions")
    assert said == alone.output
    refused = invoke(name, "--sequence", 7)
    assert refused.exit_code == 2 and "factory that returns the model alone" in refused.output


@pytest.mark.every(2)
@pytest.mark.parametrize(("memory", "code"), [("1GiB", 0), ("1000B", 1)])
def test_exit_codes(model: str, memory: str, code: int) -> None:
    result = invoke(model, "--sequence", 5, "--device-memory", memory)
    assert result.exit_code == code
    assert ("OUT OF MEMORY" in result.output) == bool(code)


def test_an_implementation_of_the_users(model: str, tmp_path: Path) -> None:
    (tmp_path / "my_memory_sharding.py").write_text(
        "import torch, zerocheck\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "def mine(model, case, mesh):\n"
        "    fully_shard(model, mesh=mesh)\n"
        "    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))\n"
    )
    name = f"{tmp_path / 'my_memory_sharding.py'}:mine"
    result = invoke(model, "--implementation", name, "--sequence", 5, "--precision", "fp32")
    assert result.exit_code == 0, result.output
    assert "the stage of this implementation is not known" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "MODEL is missing"),
        (("gpt2-xxl",), "did you mean 'gpt2-xl'"),
        (("gpt2", "--implementation", "fsdp3"), "unknown implementation 'fsdp3'"),
        (("gpt2", "--device-memory", "80 apples"), "is not a size"),
        (("gpt2", "--world-size", "0"), "it must be 1 or more"),
        (("gpt2", "--precision", "fp8"), "unknown precision 'fp8'"),
        (("gpt2", "--wrap", "blck"), "did you mean 'block'"),
        (("gpt2", "--optimizer", "sdg"), "did you mean 'sgd'"),
        (("gpt2", "--optimizer", "user"), "unknown optimizer 'user'"),
        (("gpt2", "--momentum", "0.5"), "--momentum 0.5 is of --optimizer sgd"),
        (("gpt2", "--optimizer", "sgd", "--momentum", "1"), "it must be 0 or more, and below 1"),
        (("gpt2", "--fit"), "--fit needs --device-memory SIZE"),
        (("gpt2", "--fit", "--device-memory", "80"), "did you mean '80 GiB'"),
        (("gpt2", "--fit", "--device-memory", "80GiB", "--rank", "1"), "--fit counts rank 0"),
        (("gpt2", "--microbatches", "0"), "it must be 1 or more"),
        (("gpt2", "--microbatches", "65"), "at most 64"),
        (("gpt2", "--replicas", "3"), "--replicas 3: it must divide --world-size 8"),
        (("gpt2", "--replicas", "8"), "leave each replica two ranks or more"),
        (("gpt2", "--replicas", "2", "--implementation", "ddp"), "ddp has no replicate axis"),
        ((*FITS, "--replicas", "2", "--implementation", "ddp"), "ddp has no replicate axis"),
        (("gpt2", "--tensor-parallel", "3"), "--tensor-parallel 3: it must divide --world-size 8"),
        (("gpt2", "--tensor-parallel", "8"), "gpt2 has 12 key-value heads, no multiple of 8"),
        (("gpt2", "--tensor-parallel", "2", "--replicas", "2"), "give one of them"),
        (("gpt2", "--tensor-parallel", "2", "--implementation", "ddp"), "ddp shards no layers"),
        ((*FITS, "--tensor-parallel", "2", "--implementation", "ddp"), "ddp shards no layers"),
        (("gpt2", "--link", "400GB/s"), "--link 400GB/s is of --fit"),
        ((*FITS, "--link", "400GB/s"), "needs --flops, such as 400T, too"),
        ((*FITS, "--flops", "400T"), "needs --link, such as 400GB/s, too"),
        ((*FITS, "--link", "400", "--flops", "400T"), "'400' has no unit; did you mean '400 GB/s'"),
        ((*FITS, "--link", "400GB/s", "--flops", "400"), "did you mean '400T'"),
        (("nowhere.json",), "nowhere.json cannot be read"),
        (("gpt2", "--tables"), "--tables takes no MODEL"),
        (("gpt2", "--world-size", "many"), "not a valid integer"),
        (("nowhere.py:net",), "there is no file"),
        (("gpt2", "--implementation", "ds.json+nothing"), "there is no file 'ds.json+nothing'"),
        (("gpt2", "--implementation", "deepspeed2", "--wrap", "rows"), "'rows'"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


def test_a_model_that_takes_no_tokens(model: str) -> None:
    result = invoke(model.replace(":net", ":odd"), "--sequence", 5)
    assert result.exit_code == 2
    assert "fails on tensors without data" in result.output


def test_a_file_that_cannot_be_written(model: str, tmp_path: Path) -> None:
    result = invoke(model, "--sequence", 5, "--json", tmp_path / "no" / "out.json")
    assert result.exit_code == 2 and "cannot be written" in result.output


def test_a_search_for_what_fits(model: str, tmp_path: Path) -> None:
    small = ("--fit", "--sequence", 5, "--world-size", 2, "--json", tmp_path / "out.json")
    result = invoke(model, *small, "--device-memory", "1GiB", "--implementation", "fsdp2")
    assert result.exit_code == 0, result.output
    assert "take fsdp2" in result.output and "not tried: " in result.output
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=FitReport)
    assert {row.implementation for row in report.rows} == {"fsdp2"}
    assert {row.smallest for row in report.rows} == {1} and report.most_ranks == 2
    assert all(not row.checkpoint_activations for row in report.rows)  # it has no blocks


def test_a_step_time_is_on_paper(model: str) -> None:
    words = ("--fit", "--sequence", 5, "--world-size", 2, "--device-memory", "1GiB")
    speeds = ("--link", "1kB/s", "--flops", "400T")
    result = invoke(model, *words, "--implementation", "ddp", *speeds)
    assert result.exit_code == 0, result.output
    # 90 gradients in fp32, reduced by a ring of two: half of them twice.
    assert "on paper a step takes 360 ms at least" in result.output
    assert "step on paper" in result.output and "no measurement" in result.output


@pytest.mark.long
def test_a_search_in_which_nothing_fits(model: str) -> None:
    words = ("--fit", "--sequence", 5, "--world-size", 2, "--device-memory", "200B")
    result = invoke(model, *words, "--precision", "fp32")
    assert result.exit_code == 1, result.output
    assert "nothing fits on 2 ranks" in result.output


def test_only_options_of_the_command_line_restrict_a_search() -> None:
    context = memory.make_context("memory", ["gpt2", "--wrap", "block", "--world-size", "8"])
    assert named(context) == {"model", "wrap", "world_size"}


def test_a_simulation_prints_its_progress(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is, in each line; nothing in the first seconds."""
    words = (model, "--world-size", 2, "--sequence", 5)
    assert not invoke(*words).stderr
    monkeypatch.setattr(sys.modules["zerocheck.cli.memory"], "PROGRESS_S", 0.0)
    lines = invoke(*words).stderr.splitlines()
    where = [line.rpartition(": ")[2] for line in lines if line.startswith(f"simulating {model} ")]
    assert where[0] == "building the model" and len(where) == len(lines)
    assert "step 0, forward, 0" in where and "step 1, backward, 1" in where
    assert where[-1].startswith("step 1, step")


def test_progress_is_printed_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(interval_s=3600)
    lines.notify("early")
    ProgressLines(interval_s=0).notify("late")
    assert capsys.readouterr().err == "late\n"
