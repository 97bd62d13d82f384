"""Tensor parallelism in simulations: presets compute the same, bytes and collectives are right."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_models import Sharded
from test_allocator import check_to_the_byte
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from zerocheck.adapters.fsdp2.tensor_parallel import parallelized
from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.fit.assemble import fit
from zerocheck.memory.fit.choices import Restriction
from zerocheck.memory.fit.recommend import words_of
from zerocheck.memory.formulas import total
from zerocheck.memory.presets import PRESETS, Architecture
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import ModelSource, source
from zerocheck.memory.tensor_parallel import plan_for
from zerocheck.memory.transformer import Transformer
from zerocheck.memory.verdict import CUDA_CONTEXT
from zerocheck.models.parts import show_sharded_layers

LLAMA = Architecture(
    family="llama", blocks=2, width=32, heads=4, key_value_heads=2, hidden=48, vocabulary=64,
    positions=16,
)  # fmt: skip
EXPERTS = Architecture(
    family="llama", blocks=1, width=32, heads=4, key_value_heads=2, hidden=48, vocabulary=64,
    positions=16, experts=2, active_experts=2,
)  # fmt: skip
GPT = Architecture(
    family="gpt", blocks=2, width=32, heads=4, key_value_heads=4, hidden=48, vocabulary=65,
    positions=16, tied=True,
)  # fmt: skip
SHAPES = {"llama": LLAMA, "experts": EXPERTS, "gpt": GPT}
FIELDS = {"world_size": 4, "precision": "fp32", "batch": 3, "sequence": 16, "tensor_parallel": 2}


def setup(model: str, **more: object) -> Setup:
    return Setup(model=model, **{**FIELDS, **more})  # type: ignore[arg-type]


@pytest.fixture
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SHAPES.items():
        monkeypatch.setitem(PRESETS, name, shape)


def _compared(rank: int, folder: str) -> None:
    """Compute loss and gradients of the whole models, and of those sharded over two ranks."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    differences = {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        whole = Transformer(shape).double()
        torch.manual_seed(0)
        sharded = Transformer(shape).double()
        plan = plan_for(name, sharded, 2, 12)
        show_sharded_layers(sharded, {path: layer.style for path, layer in plan.items()})
        parallelized(sharded, Setup(model=name, world_size=2).case(1), mesh)
        tokens = torch.arange(24).view(2, 12) * 7 % shape.vocabulary
        for model in (whole, sharded):
            with loss_parallel():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
        parts = dict(sharded.named_parameters())
        for path, parameter in whole.named_parameters():
            gradient = parts[path].grad
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            # Sums in double differ by less than this; those of a wrong plan by all of it.
            differences[f"{name} {path}"] = torch.allclose(parameter.grad, full)
        differences[f"{name} tied"] = len(parts) == len(dict(whole.named_parameters()))
    torch.save(differences, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.long
def test_the_presets_compute_what_they_compute_whole(tmp_path: Path) -> None:
    multiprocessing.spawn(_compared, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        assert len(found) > 40 and [path for path, same in found.items() if not same] == []


@pytest.mark.every(2)
@pytest.mark.parametrize("layers", [2, 4])
def test_to_the_byte(layers: int) -> None:
    given = setup("small_models:sharded", sequence=29, tensor_parallel=layers)
    check_to_the_byte(given)


@pytest.mark.every(2)
@pytest.mark.usefixtures("preset")
@pytest.mark.parametrize("ranks", [2, 4])
def test_between_steps_a_rank_has_the_formula_of_its_part(ranks: int) -> None:
    """16 Psi/N of its half of the layers, and of all that is not sharded."""
    report = analyse(setup("llama", world_size=ranks))
    norms = LLAMA.width * (2 * LLAMA.blocks + 1)
    ours = (LLAMA.elements() - norms) // 2 + norms
    assert report.between.formula == total(ours, ranks // 2, 3)
    assert report.between.padding == 0
    assert f"N = {ranks // 2}, Psi = {ours:,} of a rank" in report.between.words
    assert report.between.communicated is None


@pytest.mark.usefixtures("preset")
def test_collectives_are_those_of_sequence_parallelism() -> None:
    """Two gathers and two reduce-scatters of each block, both ways, next to embedding and head."""
    given = setup("llama", world_size=2)
    sent = run(given, source("llama"), exact=True).traffic.parts
    outputs = given.batch * given.sequence * 4
    each = Fraction(1, 2) * outputs * LLAMA.width
    for phase in ("forward", "backward"):
        for kind in ("all-gather", "reduce-scatter"):
            assert sent[phase, kind] == (2 * LLAMA.blocks + 1) * each, (phase, kind)
    assert sent["forward", "all-reduce"] == 3 * outputs  # of the loss: maximum, sum, logit
    assert sent["backward", "all-reduce"] == (2 * LLAMA.blocks + 1) * LLAMA.width * 4  # of norms


@pytest.mark.usefixtures("preset")
def test_what_moves_between_layers_are_activations() -> None:
    """FSDP2 gathers nothing here, since all ranks are on the tensor-parallel axis."""
    given = setup("llama", world_size=2)
    log = run(given, source("llama"), exact=True).log
    assert log is not None and len(log.collectives) > 20
    assert "gathered" not in {storage.kind for storage in log.storages}
    assert {storage.stream for storage in log.storages} == {0}


class Said(Sharded):
    def __init__(self, plan: object) -> None:
        super().__init__(1)
        self.tp_plan = plan  # type: ignore[misc,assignment]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "does not say which layers to shard; give the model an attribute tp_plan"),
        ({}, "does not say which layers to shard"),
        ({"blocks.*.up": "colwise"}, "no layer of net is named by its tp_plan: blocks.*.up"),
        ({"layers.*.up": "colwize"}, "did you mean 'colwise'"),
        ({"layers.*": "colwise"}, "layers.0 is a Block; layers that can be sharded are"),
        ({"layers.0.up": "rowwise"}, "layers.0.up of net has 37 features to shard, no multiple"),
    ],
)
def test_a_plan_that_cannot_be_followed(plan: object, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("*", "[*]")):
        plan_for("net", Said(plan), 2, 7)


def test_what_is_replicated_may_stand_in_a_plan() -> None:
    said = {"layers.*.up": "colwise", "head": "replicated_with_grad_allreduce"}
    assert [*plan_for("net", Said(said), 2, 7)] == ["layers.0.up"]


def test_key_value_heads_are_divided() -> None:
    with pytest.raises(UsageError, match="llama has 2 key-value heads, no multiple of 4"):
        plan_for("llama", Transformer(LLAMA), 4, 8)


def test_positions_are_divided() -> None:
    with pytest.raises(UsageError, match="--sequence 9 is no multiple of it"):
        plan_for("llama", Transformer(LLAMA), 2, 9)


@pytest.mark.long
@pytest.mark.usefixtures("preset", "simulated_once", "nothing_rounded")
def test_it_is_tried_where_nothing_fits_with_whole_layers() -> None:
    base = setup("llama", tensor_parallel=1, batch=1)
    given = Restriction(implementation="fsdp2", wrap="block", checkpoint=True, reshard=True)
    lowest = min(row.peak.total for row in fit(base, 1 << 30, most_ranks=4, restriction=given).rows)
    report = fit(base, CUDA_CONTEXT + lowest - 1, most_ranks=4, restriction=given)
    rows = report.rows
    assert rows and {row.tensor_parallel for row in rows} == {2}
    assert {row.tensor_parallel for row in report.unfit} >= {1}
    assert "--tensor-parallel 2" in rows[0].command and rows[0].batch == 2
    assert "layers sharded over 2" in words_of(rows[0])
    assert "with whole layers nothing fits on up to 4 ranks; " in report.advice[0]
    assert not [line for line in report.not_tried if "tensor" in line]


@pytest.mark.usefixtures("preset", "simulated_once")
def test_it_is_searched_where_it_is_asked_for() -> None:
    base = setup("llama", batch=1)
    given = Restriction(wrap="block", checkpoint=False, microbatches=1, tensor_parallel=2)
    reports = [
        fit(base, 1 << 30, most_ranks=4, restriction=given, exhaustive=exhaustive)
        for exhaustive in (False, True)
    ]
    assert [row.command for row in reports[0].rows] == [row.command for row in reports[1].rows]
    assert {row.tensor_parallel for row in reports[0].rows} == {2}
    assert {row.smallest for row in reports[0].rows} == {2}
    assert {row.implementation for row in reports[0].rows} == {"fsdp2"}


def test_a_model_that_does_not_say_how_says_so_where_nothing_fits() -> None:
    base = setup("small_models:small", tensor_parallel=1)
    report = fit(base, 1000, most_ranks=2, restriction=Restriction(implementation="fsdp2"))
    assert report.exit_code == 1
    assert any("does not say which layers to shard" in line for line in report.not_tried)


def test_a_source_gives_the_shapes_of_a_rank() -> None:
    """101 rows over two ranks are 51 and 50."""
    given = setup("small_models:sharded")
    first: ModelSource = source(given.model)
    for rank, rows in ((0, 51), (1, 50)):
        part = first.part(replace(given, rank=rank))
        shapes = {name: tuple(one.shape) for name, one in part.named_parameters()}
        assert shapes["embedding.weight"] == (rows, 37) and shapes["head.bias"] == (rows,)
        assert shapes["layers.0.up.weight"] == (74, 37)
        assert shapes["layers.0.down.weight"] == (37, 74)
        assert shapes["layers.0.down.bias"] == (37,)
