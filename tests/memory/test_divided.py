"""Experts and blocks divided over ranks: bytes are those of formulas, and of real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from small_models import Net
from test_allocator import both, check_to_the_byte
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.distributed.tensor import Shard

from zerocheck.errors import UsageError
from zerocheck.memory.allocation_tracker import AllocationTracker
from zerocheck.memory.analyse import analyse, run
from zerocheck.memory.experts import MixtureOfExperts
from zerocheck.memory.fit.assemble import _found as found_by
from zerocheck.memory.fit.assemble import fit
from zerocheck.memory.fit.bounds import lower_bound, model_bytes
from zerocheck.memory.fit.choices import Choice, Restriction
from zerocheck.memory.fit.recommend import words_of
from zerocheck.memory.fit.search import Fewest, FitSearch
from zerocheck.memory.formulas import total
from zerocheck.memory.pipeline import stage_blocks
from zerocheck.memory.presets import PRESETS, Architecture
from zerocheck.memory.samples import loss_of_tokens
from zerocheck.memory.setup import AxisSizes, Setup
from zerocheck.memory.simulate import simulate
from zerocheck.memory.source import source
from zerocheck.memory.timeline import Timeline, timeline
from zerocheck.memory.transformer import Transformer

DENSE = Architecture(
    family="llama",
    blocks=6,
    width=32,
    heads=4,
    key_value_heads=2,
    hidden=48,
    vocabulary=64,
    positions=16,
)
EXPERTS = replace(DENSE, blocks=2, experts=4, active_experts=2)
SHAPES = {"dense": DENSE, "experts": EXPERTS, "deep": replace(DENSE, blocks=28)}
FIELDS = {"world_size": 4, "precision": "fp32", "batch": 2, "sequence": 16}
EACH = 3 * EXPERTS.width * EXPERTS.hidden
"""Elements of an expert."""
BLOCK = (DENSE.elements() - DENSE.width * (2 * DENSE.vocabulary + 1)) // DENSE.blocks


def setup(model: str, **more: object) -> Setup:
    return Setup(model=model, **{**FIELDS, **more})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def preset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SHAPES.items():
        monkeypatch.setitem(PRESETS, name, shape)


@pytest.mark.parametrize(("ranks", "divided"), [(4, 2), (2, 2)])
def test_experts_are_sharded_over_the_ranks_that_have_them(ranks: int, divided: int) -> None:
    report = analyse(setup("experts", world_size=ranks, expert_parallel=divided))
    experts = EXPERTS.blocks * EXPERTS.experts * EACH
    own = total(experts // divided, ranks // divided, 3)
    assert report.between.formula == own + total(EXPERTS.elements() - experts, ranks, 3)
    assert report.between.padding == 0
    assert f"(16 Psi/(N/{divided}) of {experts // divided:,}" in report.between.words
    assert report.between.copies == pytest.approx(1, rel=0.01)


def test_tokens_go_to_the_ranks_of_their_experts_and_come_back() -> None:
    """Each block sends 2 rows of each token twice, and 3/4 of them to other ranks."""
    given = setup("experts", expert_parallel=4)
    sent = run(given, source("experts"), exact=True).traffic.parts
    rows = given.batch * given.sequence * EXPERTS.active_experts
    each = Fraction(3, 4) * rows * EXPERTS.width * 4
    for phase in ("forward", "backward"):
        assert sent[phase, "all-to-all"] == 2 * EXPERTS.blocks * each, phase


def test_blocks_are_divided_with_the_ends_as_a_block_each() -> None:
    assert [*map(len, stage_blocks(32, 4))] == [8, 9, 8, 7]
    for blocks in (6, 7, 28):
        assert [block for one in stage_blocks(blocks, 4) for block in one] == [*range(blocks)]


@pytest.mark.parametrize(
    ("rank", "elements"),
    [
        (0, 2 * BLOCK + DENSE.width * DENSE.vocabulary),
        (3, 3 * BLOCK),
        (5, BLOCK + DENSE.width * (DENSE.vocabulary + 1)),
    ],
)
def test_a_stage_has_the_formula_of_its_part(rank: int, elements: int) -> None:
    given = setup("dense", world_size=6, pipeline_parallel=3, microbatches=3, rank=rank)
    report = analyse(given)
    assert report.between.formula == total(elements, 2, 3)
    assert report.between.padding == 0 and report.rank == rank
    assert f"N = 2, Psi = {elements:,} of the stage" in report.between.words


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_has_as_many_microbatches_as_stages_follow(place: int) -> None:
    """So many forwards come before the first backward, and gradients are reduced once."""
    given = setup("dense", world_size=6, pipeline_parallel=3, microbatches=4, rank=2 * place)
    one = simulate(given, source("dense"))
    runs = timeline(one.log, one.blocks).microbatches(1)
    backward = [any(e.phase == "backward" and ".mm." in e.operator for e in run) for run in runs]
    assert backward == [True] * (2 + place)  # the first forwards are one
    reduced = [call for call in one.log.collectives if call.kind == "reduce-scatter"]
    units = len(stage_blocks(DENSE.blocks, 3)[place]) + (place != 1)
    assert len(reduced) == 2 * units
    hidden = given.batch * given.sequence * DENSE.width * 4
    sent = [call.sent for call in one.log.collectives if call.kind == "send" and call.step == 1]
    assert sent == [hidden] * (8 if place == 1 else 4)


class Own(Net):
    pp_plan = ("embedding", "layers", "head")


def own() -> nn.Module:
    return Own(4)


@pytest.mark.every(2)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_stage_to_the_byte(rank: int) -> None:
    """But for 8 bytes of each loss, by which autograd divides its gradient: no memory of a GPU."""
    given = setup("test_divided:own", pipeline_parallel=2, microbatches=3, rank=rank)
    if rank == 0:
        return check_to_the_byte(given)
    line, measured = both(given)
    assert 0 <= measured.peak - line.peak().total <= 3 * 8
    assert sum(line.at_end("step", 1).values()) == measured.ends[1, "step"]


@pytest.mark.long
def test_stages_that_are_extrapolated_are_those_that_are_simulated() -> None:
    given = setup("deep", pipeline_parallel=2, microbatches=2, rank=2)
    few, all_of_them = (run(given, source("deep"), exact=exact) for exact in (False, True))
    assert few.simulated and few.timeline.events == all_of_them.timeline.events
    assert few.traffic == all_of_them.traffic


@pytest.mark.long
def test_the_stage_that_needs_the_most_is_counted() -> None:
    given = setup("dense", world_size=2, pipeline_parallel=2, microbatches=2)
    report = analyse(given)
    other = run(replace(given, rank=1 - report.rank), source("dense"))
    assert other.timeline.peak().total < report.peak.total
    assert any("needs the most" in line for line in report.assumes)
    assert report.command.endswith("--microbatches 2 --pipeline-parallel 2")


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("dense", {"expert_parallel": 2}, "dense has no experts"),
        ("experts", {"expert_parallel": 3, "world_size": 6}, "4 experts, no multiple of 3"),
        ("experts", {"expert_parallel": 4, "sequence": 15, "batch": 1}, "no multiple of 4 experts"),
        ("experts", {"expert_parallel": 3}, "it must divide --world-size 4"),
        ("experts", {"pipeline_parallel": 2, "expert_parallel": 4}, "it must divide the ranks of"),
        ("dense", {"pipeline_parallel": 2}, "1F1B of 2 stages needs 2 or more"),
        ("dense", {"pipeline_parallel": 4, "tensor_parallel": 2}, "give one of them"),
        ("dense", {"expert_parallel": 2, "offload": "pinned"}, "give one of them"),
        ("dense", {"pipeline_parallel": 2, "replicas": 2}, "give one of them"),
        ("experts", {"expert_parallel": 2, "optimizer": "muon"}, "give one of them"),
        ("dense", {"pipeline_parallel": 2, "implementation": "ddp"}, "has no pipeline stages"),
        ("dense", {"pipeline_parallel": 8, "world_size": 8}, "6 blocks, too few for a stage each"),
        ("gpt2", {"pipeline_parallel": 2, "microbatches": 2}, "ties parameters"),
        ("small_models:plain", {"pipeline_parallel": 2}, "has no list of blocks"),
        ("small_models:small", {"pipeline_parallel": 2}, "does not say which stage has embedding"),
    ],
)
def test_what_cannot_be_divided(model: str, fields: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        analyse(setup(model, **fields))


@pytest.mark.long
def test_bounds_are_below_what_a_rank_holds() -> None:
    stages = {"pipeline_parallel": 2, "microbatches": 2}
    for fields in ({"expert_parallel": 4}, {**stages, "expert_parallel": 2}):
        given = setup("experts", **fields, reshard=False, rank=0)
        part = source("experts").part(given)
        bound = lower_bound(given, model_bytes(part, given.expert_parallel))
        peak = run(given, source("experts")).timeline.peak().total
        assert peak / 4 < sum(bound.values()) <= peak


def test_axes_are_tried_in_turn_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, ...]] = []

    def fewest(_: FitSearch, given: Restriction, *, exhaustive: bool) -> list[Fewest]:
        sizes = given.tensor_parallel, given.expert_parallel, given.pipeline_parallel
        tried.append(tuple(size or 1 for size in sizes))
        ranks = None if exhaustive or tried[-1] != (1, 1, 2) else 2
        return [Fewest(Choice("fsdp2", "block", True, False, 2), ranks, {}, simulated=True)]

    monkeypatch.setattr(FitSearch, "fewest", fewest)
    for model, steps in (("experts", [(1, 2, 1), (1, 4, 1)]), ("dense", [])):
        tried.clear()
        search = FitSearch(setup(model), source(model), 1 << 30, (4,))
        found, left = found_by(search, Restriction(), exhaustive=False)
        assert tried == [(1, 1, 1), (2, 1, 1), *steps, (1, 1, 2)]
        assert found[-1].ranks == 2
        assert (
            left[0].startswith("tensor parallelism: --tensor-parallel 4: dense has 2 key") or steps
        )
        assert left[-1] == "CPU offload (--offload): something fits without"
    left = found_by(search, Restriction(pipeline_parallel=2), exhaustive=False)[1]
    assert left == []


def test_choices_are_in_words() -> None:
    axes = AxisSizes(expert_parallel=2, pipeline_parallel=4)
    row = mock.Mock(implementation="fsdp2", units=False, reshard=True, **axes._asdict())
    row.configure_mock(offload="none", checkpoint_activations=False, microbatches=1)
    assert words_of(row) == "fsdp2, experts divided over 2, 4 pipeline stages"


@pytest.mark.long
def test_a_search_of_stages_and_experts() -> None:
    base = setup("experts", batch=1, microbatches=2)
    given = Restriction(wrap="block", expert_parallel=2, pipeline_parallel=2, checkpoint=False)
    rows = fit(base, 1 << 30, most_ranks=8, restriction=given).rows
    assert {(row.expert_parallel, row.pipeline_parallel) for row in rows} == {(2, 2)}
    assert {row.smallest for row in rows} == {4} and {row.batch for row in rows} <= {1, 2}


SCENARIOS = [
    {"model": "experts", "expert_parallel": 2, "microbatches": 2},
    {"model": "dense", "pipeline_parallel": 2, "microbatches": 4},
    {"model": "dense", "pipeline_parallel": 4, "microbatches": 5, "reshard": False},
    {"model": "experts", "pipeline_parallel": 2, "expert_parallel": 2, "microbatches": 3},
]


@pytest.mark.long
def test_real_ranks_hold_what_is_simulated(tmp_path: Path) -> None:
    """Loops as users write them, with gloo. Its Work keeps what was sent, and NCCL's does not."""
    multiprocessing.spawn(_trained, (str(tmp_path),), nprocs=4)
    for number, fields in enumerate(SCENARIOS):
        for rank in range(4):
            given = setup(**{**fields, "rank": rank})  # type: ignore[arg-type]
            one = simulate(given, source(given.model), data=True)
            simulated = _most(timeline(one.log, one.blocks))
            assert json.loads((tmp_path / f"{number}-{rank}").read_text()) == simulated


def _most(line: Timeline) -> list[int]:
    """Peaks of both steps."""
    held = [(event.step, sum(each)) for event, each, _ in line.instants()]
    return [max(size for at, size in held if at == step) for step in (0, 1)]


def _trained(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=4, store=dist.FileStore(f"{folder}/store", 4)
    )

    def wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
        works.clear()

    with mock.patch.object(schedules, "_wait_batch_p2p", wait):
        for number, fields in enumerate(SCENARIOS):
            most = _two_steps(rank, setup(**fields))  # type: ignore[arg-type]
            Path(f"{folder}/{number}-{rank}").write_text(json.dumps(most))
    dist.destroy_process_group()


def _stage(given: Setup, place: int) -> Transformer:
    shape, stages = SHAPES[given.model], given.pipeline_parallel
    with torch.device("meta"):
        model = Transformer(shape)
    model.blocks = model.blocks[slice(*_bounds(shape.blocks, stages, place))]
    if place > 0:
        model.embedding = nn.Identity()  # type: ignore[assignment]
    if place < stages - 1:
        model.norm = model.head = nn.Identity()  # type: ignore[assignment]
    return model


def _bounds(blocks: int, stages: int, place: int) -> tuple[int, int]:
    """Ends of a stage's blocks: of the embedding, the blocks and the head, divided evenly."""
    parts = torch.arange(-1, blocks + 1).tensor_split(stages)[place]
    inside = [part for part in parts.tolist() if 0 <= part < blocks]
    return inside[0], inside[-1] + 1


def _two_steps(rank: int, given: Setup) -> list[int]:
    stages, divided, count = given.pipeline_parallel, given.expert_parallel, given.microbatches
    ranks = 4 // stages
    mesh = init_device_mesh("cpu", (stages, ranks), mesh_dim_names=("pp", "dp"))
    both = init_device_mesh(
        "cpu", (stages, ranks // divided, divided), mesh_dim_names=("pp", "efsdp", "ep")
    )
    place = rank // ranks
    model = _stage(given, place)
    experts: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and divided > 1:
            module.group = both.get_group("ep")
            module.experts = module.experts[: len(module.experts) // divided]
            experts |= {*module.experts.parameters()}
    own = ShardPlacementResult(Shard(0), FSDPMeshInfo(both["efsdp"], shard_mesh_dim=0))

    def shard(module: nn.Module, *, reshard: bool | None) -> None:
        fully_shard(
            module,
            mesh=mesh["dp"],
            reshard_after_forward=reshard,
            shard_placement_fn=lambda parameter: own if parameter in experts else None,
        )

    for block in model.blocks:
        shard(block, reshard=given.reshard)
    shard(model, reshard=None if given.reshard else False)
    tokens = torch.randint(64, (given.batch * (count if stages > 1 else 1), given.sequence))
    tracker = AllocationTracker()
    with tracker:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        tracker.claim_rest([tokens], "inputs")
        groups: dict[object, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            groups.setdefault(parameter.device_mesh, []).append(parameter)  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW([{"params": each} for each in groups.values()], foreach=True)
        if stages > 1:
            stage = PipelineStage(
                model, place, stages, torch.device("cpu"), group=mesh.get_group("pp")
            )
            schedule = Schedule1F1B(
                stage, count, lambda *pair: loss_of_tokens(*pair) / count, scale_grads=False
            )
        for step in range(2):
            tracker.enter("forward", step)
            optimizer.zero_grad()
            if stages > 1:
                inputs = () if place else (tokens,)
                target = tokens if place == stages - 1 else None
                schedule.step(*inputs, target=target, losses=[], return_outputs=False)
            else:
                for _ in range(count):
                    whole = loss_of_tokens(model(tokens), tokens)
                    loss = whole / count
                    loss.backward()
            optimizer.step()
        tracker.enter("closed", 1)
    return _most(timeline(tracker.log, "blocks"))
