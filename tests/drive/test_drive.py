"""What the drive does around an implementation, without rank processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zerocheck.case.schema import Case
from zerocheck.contract import Shard
from zerocheck.drive.collectives import CollectiveTrace
from zerocheck.drive.forward_probe import ForwardProbe
from zerocheck.drive.poison import poison_memory
from zerocheck.drive.recorder import GRADIENT_ROLES, Recorder, state_roles
from zerocheck.execution.alignment import ALIGNMENT, place
from zerocheck.judge.mirrors import pass_detached, pass_through
from zerocheck.protocol.observations import Lie


@dataclass
class _Slot:
    offset: int
    numel: int
    dtype: str


class _Store:
    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def put(self, tensors: Sequence[torch.Tensor]) -> _Slot:
        self.held.append(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        return _Slot(len(self.held) - 1, self.held[-1].numel(), str(tensors[0].dtype))


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def deterministic() -> object:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def test_memory_that_nobody_wrote_is_nan(deterministic: object) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    with poison_memory():
        assert bool(torch.empty(1000).isnan().all())
        grown = torch.ones(10)
        grown.untyped_storage().resize_(0)
        grown.untyped_storage().resize_(40)
        assert bool(grown.isnan().all())
        kept = torch.ones(20)[:10]
        kept.untyped_storage().resize_(40)
        kept.untyped_storage().resize_(80)
        assert kept.tolist() == [1.0] * 10
        assert bool(torch.ones(0).new_empty(5).isnan().all())
    released = torch.zeros(10)
    released.untyped_storage().resize_(0)
    released.untyped_storage().resize_(40)
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_where_shards_lie_in_memory() -> None:
    recorder = Recorder(_Store())
    flat, alone = torch.zeros(8), torch.zeros(2, 3)
    recorder.lay(
        [
            Shard("a", "parameter", flat[1:3], (4,), slice(2, 4)),
            Shard("b", "parameter", alone, (2, 3)),
            Shard("b", "gradient", alone, (2, 3)),
            Shard("bucket", "padding", flat[6:], (8,), slice(6, 8)),
            Shard("c", "parameter", alone.t(), (3, 2)),
        ]
    )
    assert recorder.memory == (
        Lie("a", 2, 4, 0, 8, 1),
        Lie("b", 0, 6, 1, 6, 0),
        Lie("bucket", 6, 8, 0, 8, 6, True),
    )


def test_a_collective_is_noted_with_its_elements(single_rank: None) -> None:
    noted: list[tuple[str, int]] = []
    with CollectiveTrace(lambda name, number: noted.append((name, number))):
        dist.all_reduce(torch.zeros(3, 2))
        dist.all_gather([torch.zeros(4)], torch.zeros(4))
    assert noted == [("allreduce(6)", 1), ("allgather(4)", 2)]


def test_equal_manifests_are_kept_once() -> None:
    store = _Store()
    recorder = Recorder(store)
    weight = torch.arange(6.0)
    for step in range(3):
        shards = [
            Shard("w", "parameter", weight[2:5], (6,), slice(2, 5)),
            Shard("w", "gradient", None, (6,), slice(2, 5)),
            Shard("n", "buffer", torch.tensor(step), ()),
        ]
        recorder.take(step, "state", shards, state_roles(Case()))
        recorder.take(step, "reduced", shards, GRADIENT_ROLES)
    assert len(recorder.manifests) == 3
    assert [record.role for record in recorder.records[:3]] == ["parameter", "buffer", "gradient"]
    gradient = recorder.records[2]
    assert gradient.numel == 0
    assert not recorder.manifests[gradient.manifest][0].present
    assert store.held[0].tolist() == [2.0, 3.0, 4.0]
    weight.zero_()
    assert store.held[0].tolist() == [2.0, 3.0, 4.0]


def test_a_shard_of_another_size_than_its_index() -> None:
    wrong = Shard("w", "parameter", torch.zeros(4), (6,), slice(2, 5))
    with pytest.raises(ValueError, match=r"'w' with 4 elements .* for an index of 3 elements"):
        Recorder(_Store()).take(0, "state", [wrong], state_roles(Case()))


@pytest.mark.parametrize("offset", [0, 4, 32, 60])
def test_place_puts_a_tensor_where_it_is_asked_for(offset: int) -> None:
    tensor = torch.randn(3, 5)
    placed = place(tensor, offset)
    assert placed.data_ptr() % ALIGNMENT == offset
    assert torch.equal(placed, tensor)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 5), (1, 3)), ((3, 5), (5, 1)), ((), ()), ((0, 3), (3, 1)), ((4, 1), (1, 7))],
)
def test_place_gives_the_strides_that_are_asked_for(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tensor = torch.randn(shape)
    placed = place(tensor, 8, strides)
    assert placed.stride() == strides
    assert placed.numel() == 0 or placed.data_ptr() % ALIGNMENT == 8
    assert torch.equal(placed, tensor)


def test_the_probe_sees_strides_that_are_not_the_models_own() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[1].weight = nn.Parameter(model[1].weight.detach().t().contiguous().t())
    probe = ForwardProbe(model)
    x = torch.randn(3, 4)
    with probe.watching():
        model(x)
    assert probe.strides == {}
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    model[1].weight.data = model[1].weight.data.contiguous()
    with probe.watching():
        model(x)
    assert probe.strides == {"0.weight": (1, 6), "1.weight": (6, 1)}
    probe.forget()
    assert probe.strides == {}


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x)


def test_the_probe_sees_misaligned_parameters_and_inputs_that_pass_a_node() -> None:
    model = nn.Sequential(nn.Linear(4, 16), _Residual(), nn.Linear(16, 2))
    probe = ForwardProbe(model)
    model[0].weight.data = place(model[0].weight.data, 20)
    hook = model[1].norm.register_forward_pre_hook(pass_through)
    with probe.watching():
        model(torch.randn(3, 4)).sum().backward()
    assert probe.misaligned == {"0.weight": 20}
    assert probe.passed_through == {"1.norm"} and probe.restrided == set()
    hook.remove()
    probe.forget()
    with probe.watching():
        model(torch.randn(3, 4))
    assert probe.passed_through == set()
    probe.forget()
    model(torch.randn(3, 4))
    assert probe.misaligned == {}


@pytest.mark.parametrize(("node", "restrided"), [(pass_through, True), (pass_detached, False)])
def test_the_probe_sees_which_node_changes_strides(node: Any, restrided: bool) -> None:
    """FSDP2's and DeepSpeed's differ where a dim has size 1."""
    model = nn.Identity()
    probe = ForwardProbe(model)
    hook = model.register_forward_pre_hook(node)
    with probe.watching():
        given = model(torch.randn(1, 3, requires_grad=True).as_strided((1, 3), (7, 1)))
    hook.remove()
    assert probe.passed_through == {""}
    assert probe.restrided == ({""} if restrided else set())
    assert (given.stride() == (7, 1)) is not restrided


def test_passing_a_node_changes_the_order_of_additions() -> None:
    """Why the reference must do the same: the bits of the gradient differ without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), _Residual())
    x = torch.randn(64, 4)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(x).square().sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad.clone()

    plain = gradient()
    hook = model[1].norm.register_forward_pre_hook(pass_through)
    passed = gradient()
    hook.remove()
    assert not torch.equal(plain, passed)
    assert torch.allclose(plain, passed, rtol=1e-4)
