"""Compiled models: that they are, what is refused, and that bounds are said to be estimated."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from slices import sliced
from torch.distributed.device_mesh import DeviceMesh

from zerocheck.adapters.ddp.adapter import Ddp
from zerocheck.adapters.fsdp1.adapter import Fsdp1
from zerocheck.adapters.fsdp2.adapter import Fsdp2
from zerocheck.case.measurement import UNMEASURED
from zerocheck.case.schema import Block, Case, Data, Disturbance, Model, Sharding, Training
from zerocheck.contract import Implementation
from zerocheck.models.batches import batch
from zerocheck.models.network import build_model
from zerocheck.protocol.verdicts import ESTIMATED
from zerocheck.ranks.pool import Pool
from zerocheck.run.execute.trial import Trial
from zerocheck.run.findings.findings import failures_of
from zerocheck.run.records.finding_text import finding_text

from .driver import in_ranks
from .holding import holds

KINDS: dict[str, type[Implementation]] = {"ddp": Ddp, "fsdp1": Fsdp1, "fsdp2": Fsdp2}


def compiled(backend: str, **fields: object) -> Case:
    case = Case(
        mesh=(2,),
        model=Model(inputs=5, width=4, outputs=3, blocks=(Block(kind="mlp"),)),
        data=Data(batch=2, length=2),
        training=Training(steps=2, compile=backend),  # type: ignore[arg-type]
    )
    return replace(case, **fields)


def _graphs(mesh: DeviceMesh, kind: type, case: Case) -> tuple[int, int]:
    """Graphs that a forward compiled, and code that is known as compiled after close."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.utils import counters

    subject = kind(build_model(case), case, mesh)
    drawn = batch(case, step=0, rank=mesh.get_rank(), microbatch=0)
    subject.built.model(*drawn.inputs)
    made = counters["stats"]["unique_graphs"] if input_codes.seen else 0
    subject.close()
    return made, len(input_codes.seen)


@pytest.mark.parametrize("name", sliced(list(KINDS), ["fsdp2"]))
def test_the_model_is_compiled_and_forgotten(name: str) -> None:
    ((made, left),) = in_ranks(1, _graphs, KINDS[name], compiled("eager", mesh=(1,)))
    assert made > 0 and left == 0


@pytest.mark.parametrize("backend", sliced(["eager", "aot_eager", "inductor"], ["aot_eager"]))
@pytest.mark.parametrize("name", sliced(list(KINDS), ["fsdp2"]))
def test_what_is_right_holds_and_is_said_to_be_estimated(
    pool: Pool, name: str, backend: str
) -> None:
    judgement = holds(pool, name, compiled(backend), ("gradient", "persistent"))
    assert judgement.estimated == ("gradient",)
    assert judgement.statuses == {"gradient": "holds", "persistent": "unsupported"}
    assert judgement.unjudged == {"persistent": UNMEASURED}


def test_memory_alone_is_unsupported(pool: Pool) -> None:
    found = Trial(pool, "ddp", compiled("eager"), obligations=("persistent",)).outcome()
    assert found.status == "unsupported" and found.reason == UNMEASURED


def test_a_finding_says_that_its_bound_is_estimated(pool: Pool) -> None:
    name = "zerocheck.faults.wrapper_options:CompiledLossTimesWorld"
    case = compiled("eager", mesh=(3,))
    for asked, estimated in ((case, True), (replace(case, training=Training(steps=1)), False)):
        outcome = Trial(pool, name, asked).outcome()
        assert (outcome.status == "violated") is estimated
        for one in failures_of(outcome.record(0, name, asked)):
            assert one.causes == ("gradient x W",) and one.estimated
            assert ESTIMATED in " ".join(finding_text(one).split())


def test_what_cannot_be_compiled_or_compared_is_refused() -> None:
    late = compiled("eager", disturbance=Disturbance(delay=1.0))
    masks = replace(compiled("aot_eager").model, blocks=(Block(kind="mlp", dropout=0.5),))
    small = compiled("eager", sharding=Sharding(bucket=64))
    flat = compiled("eager", sharding=Sharding(use_orig_params=False))
    for kind in KINDS.values():
        assert kind.supports(compiled("aot_eager")) is None
        assert "dispatch mode" in (kind.supports(late) or "")
        assert "dropout" in (kind.supports(compiled("aot_eager", model=masks)) or "")
        assert kind.supports(compiled("eager", model=masks)) is None
    assert "DDPOptimizer" in (Ddp.supports(small) or "")
    assert "use_orig_params" in (Fsdp1.supports(flat) or "")


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "compiler" in (Fsdp2.supports(compiled("inductor")) or "")


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize(
    ("backend", "checkpoint", "words"),
    [
        ("eager", False, None),
        ("eager", True, "that is checkpointed are updated once, and twice on one device"),
        ("aot_eager", False, "cannot compile a batch norm over features, on one device neither"),
        ("none", True, None),
    ],
)
def test_batch_norms(
    kind: type[Implementation], backend: str, checkpoint: bool, words: str | None
) -> None:
    """What torch.compile alone makes of them is not blamed on who shards."""
    block = Block(kind="batch_norm", checkpoint=checkpoint)
    case = compiled(backend, model=Model(blocks=(block,)), sharding=Sharding(bucket=1 << 20))
    reason = kind.supports(case)
    assert reason is None if words is None else words in str(reason)


def test_torch_alone_cannot_compile_a_batch_norm() -> None:
    """When it can, they need not be refused any more."""
    model = build_model(Case(model=Model(blocks=(Block(kind="batch_norm"),))))
    model.compile(backend="aot_eager")
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        model(torch.randn(4, 3, 8))
    torch.compiler.reset()
