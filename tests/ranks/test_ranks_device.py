"""What a rank takes, and what is set before a GPU starts. No GPU is needed: the calls to the driver
are stood in for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from zerocheck.errors import UsageError
from zerocheck.ranks.device import GLOO, NCCL, SHARED, backend_of, check_there, prepare, shares
from zerocheck.run.execute.launch import sharing_note

FLAGS = [
    (torch.backends.cuda.matmul, "allow_tf32", True),
    (torch.backends.cudnn, "allow_tf32", True),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", False),
]
"""Where, which, and its value when runs are not to be repeated."""


def test_a_gpu_without_memory(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    def full(number: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    monkeypatch.setattr(torch.cuda, "set_device", full)
    with pytest.raises(UsageError, match=r"cuda:1 has no memory left.*--world-sizes"):
        prepare("cuda", 1)


def test_another_error_of_a_gpu(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    def broken(number: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "set_device", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        prepare("cuda", 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """GPUs that were taken, on a host that has two."""
    before = [getattr(place, name) for place, name, _ in FLAGS]
    attention = torch.backends.cuda.flash_sdp_enabled()
    for place, name, value in FLAGS:
        setattr(place, name, value)
    numbers: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    yield numbers
    for (place, name, _), value in zip(FLAGS, before, strict=True):
        setattr(place, name, value)
    for enable in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(attention)


def test_a_gpu_is_that_of_the_local_rank_and_repeatable(taken: list[int]) -> None:
    assert prepare("cuda", 1) == torch.device("cuda", 1)
    assert taken == [1]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert [getattr(place, name) for place, name, _ in FLAGS] == [False, False, False, True]
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]


def test_the_cpu_needs_nothing(taken: list[int]) -> None:
    assert prepare("cpu", 3) == torch.device("cpu")
    assert taken == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.backends.cudnn.benchmark
    assert not shares("cpu", 9)


def test_more_ranks_than_gpus_share_them_and_use_gloo(taken: list[int]) -> None:
    assert prepare("cuda", 3) == torch.device("cuda", 1)
    assert prepare("cuda:0", 3) == torch.device("cuda", 0)
    assert taken == [1, 0]
    assert not shares("cuda", 2) and shares("cuda", 3)
    assert shares("cuda:0", 2) and not shares("cuda:0", 1)
    assert backend_of("cuda", shared=False) == NCCL
    assert backend_of("cuda", shared=True) == SHARED
    assert backend_of("cuda", shared=False, asked="gloo") == SHARED
    assert backend_of("cpu", shared=False) == GLOO
    with pytest.raises(UsageError, match="nccl refuses ranks that share a GPU"):
        backend_of("cuda", shared=True, asked="nccl")


def test_it_is_said_that_ranks_share(taken: list[int]) -> None:
    assert "up to 3 ranks share the GPUs of cuda: with gloo" in sharing_note("cuda", 3)
    assert sharing_note("cuda", 2) == sharing_note("cpu", 9) == ""
    with pytest.raises(UsageError, match="this machine has 2"):
        sharing_note("cuda:2", 1)


def test_the_mesh_of_ranks_that_share_takes_the_default_group() -> None:
    """torch makes another group, of nccl, for a mesh of GPUs if the default one is "gloo"."""
    script = (
        "import torch.distributed as d, tempfile;"
        f"d.init_process_group({SHARED!r}, init_method='file://' + tempfile.mktemp(), rank=0,"
        " world_size=1);"
        "print(d.get_backend() != 'gloo')"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout.strip() == "True", ran.stderr


@pytest.mark.parametrize(
    ("device", "count", "visible", "message"),
    [
        ("cuda:2", 2, None, "this machine has 2 CUDA devices (allowed: cpu, cuda, cuda:0, cuda:1)"),
        ("cuda:1", 1, None, "this machine has 1 CUDA device (allowed: cpu, cuda, cuda:0)"),
        ("cuda", 0, None, "--device cuda: there is no CUDA device here"),
        ("cuda", 0, "", "(CUDA_VISIBLE_DEVICES is '')"),
    ],
)
def test_a_device_that_is_not_there(
    taken: list[int],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    count: int,
    visible: str | None,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    with pytest.raises(UsageError) as raised:
        prepare(device, 0)
    assert message in str(raised.value)
    check_there("cpu")


def test_torch_without_cuda_says_so(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UsageError, match=r"torch .* is built without CUDA \(allowed: cpu\)"):
        check_there("cuda")


def test_a_workspace_that_gives_other_bits(taken: list[int]) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    prepare("cuda", 0)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with pytest.raises(UsageError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*allowed: :4096:8"):
        prepare("cuda", 0)


ZYGOTE = """
import json, os, traceback, torch
asked = []
def noting(name):
    def asks(*_, **__):
        asked.append([name, traceback.format_stack(limit=6)[-4:-1]])
        return name == "is_available"
    return asks
torch.backends.cuda.is_built = lambda: True
for name in ("_lazy_init", "current_device", "is_current_stream_capturing", "device_count"):
    setattr(torch.cuda, name, noting(name))
torch.cuda.is_available = noting("is_available")
torch.accelerator.current_accelerator = lambda **_: torch.device("cuda")
class Stream:
    is_capturing = noting("is_current_stream_capturing")
torch.accelerator.current_stream = lambda *_: Stream()
from zerocheck.ranks import zygote
from zerocheck.ranks.messages import Hello
import sys
FAULT
zygote._prepare(Hello(os.getpid(), "zerocheck.drive.rank:run", sys.path, None, "/", [], []))
print(json.dumps([one for one in asked if one[0] != "is_available" or "optim" in str(one[1])]))
"""


def asked_of_the_driver(fault: str = "") -> list[list[object]]:
    """What the zygote asks of CUDA before it forks, on a torch that is built with CUDA."""
    script = ZYGOTE.replace("FAULT", fault)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: list[list[object]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_the_zygote_leaves_cuda_alone() -> None:
    """Once the driver has started, no forked rank can use a GPU. A step of AdamW as it is asks
    whether a graph is captured there."""
    assert asked_of_the_driver() == []
    plain = (
        "import contextlib; zygote.mock.patch.object = lambda *_, **__: contextlib.nullcontext()"
    )
    names = {str(one[0]) for one in asked_of_the_driver(plain)}
    assert names & {"is_available", "is_current_stream_capturing"}
