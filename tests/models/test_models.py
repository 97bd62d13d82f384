"""Models, samples and starts: finite, repeatable, as the case says, and of no outer state."""

from __future__ import annotations

import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from zerocheck.case.codec import merged
from zerocheck.case.drawing import draw
from zerocheck.case.features import FEATURES
from zerocheck.case.schema import Case
from zerocheck.case.shapes import (
    matching,
    parameter_dtypes,
    parameter_elements,
    parameter_shapes,
    sometimes_used,
    transposed,
    uncalled,
)
from zerocheck.case.validity import check
from zerocheck.contract.start import initial_state
from zerocheck.models import Network, batch, build_model, loss_of
from zerocheck.models.batches import IGNORED
from zerocheck.models.seeds import seed_of

torch.set_num_threads(1)

DRAWN = draw(300, seed=4, world_sizes=(1, 2, 3, 4, 8))
TOKENS = {"stem": "embedding", "inputs": 6, "width": 4}


def case_of(**fields: Any) -> Case:
    case = merged(Case(), fields, source="test")
    check(case)
    return case


def backward(case: Case, *, step: int = 0, rank: int = 0) -> tuple[Network, torch.Tensor]:
    """The model after the forward and backward of one microbatch, and its loss."""
    model = build_model(case)
    sample = batch(case, step=step, rank=rank, microbatch=0)
    torch.manual_seed(sample.seed)
    loss = loss_of(case)(model(*sample.inputs), sample.target)
    loss.backward()  # type: ignore[no-untyped-call]
    return model, loss.detach()


def bits(case: Case) -> bytes:
    """Everything that follows from a case."""
    model = build_model(case)
    tensors = [*model.state_dict().values(), *(initial_state(case, model) or {}).values()]
    for rank in range(min(2, case.world_size)):
        sample = batch(case, step=1, rank=rank, microbatch=0)
        tensors += [*sample.inputs, sample.target, torch.tensor(sample.seed)]
    return b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def test_losses_and_gradients_are_finite() -> None:
    for case in DRAWN:
        model, loss = backward(case)
        assert loss.dim() == 0
        assert loss.dtype == torch.float32
        assert 0 < loss.item() / case.data.loss_factor < 1e3
        idle = uncalled(case.model)
        frozen = matching(parameter_shapes(case.model), case.model.frozen)
        for name, parameter in model.named_parameters():
            if name in frozen or name.startswith(idle):
                assert parameter.grad is None, (name, case)
            elif name.startswith(sometimes_used(case.model)):
                assert parameter.grad is None or parameter.grad.isfinite().all(), (name, case)
            else:
                assert parameter.grad is not None, (name, case)
                assert parameter.grad.isfinite().all(), (name, case)
        for buffer in model.buffers():
            assert buffer.isfinite().all()


def test_names_and_shapes_are_those_that_were_computed() -> None:
    for case in DRAWN:
        model = build_model(case)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert shapes == parameter_shapes(case.model)
        assert list(shapes) == list(parameter_shapes(case.model))
        strided = [name for name, p in model.named_parameters() if not p.is_contiguous()]
        assert strided == list(transposed(case.model))
        assert sum(p.numel() for p in model.parameters()) == parameter_elements(case.model)


def test_no_value_is_zero_but_those_that_are_asked_for() -> None:
    for case in DRAWN:
        model = build_model(case)
        zeros = matching(parameter_shapes(case.model), case.start.zeros)
        for name, parameter in model.named_parameters():
            assert bool((parameter == 0).all() if name in zeros else (parameter != 0).all()), name
            assert parameter.data_ptr() % 64 == 0


def test_clipping_is_active_and_inactive() -> None:
    tight, loose = [], []
    for case in DRAWN:
        if case.training.clip is None or case.start.zeros:
            continue
        model, _ = backward(case)
        kind = float(case.training.norm)
        grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
        norm = float(torch.nn.utils.get_total_norm(grads, kind))
        if FEATURES["clip-tight"].present(case):
            tight.append(norm > case.training.clip)
        if FEATURES["clip-loose"].present(case):
            loose.append(norm < case.training.clip)
    assert len(tight) >= 15
    assert len(loose) >= 15
    assert sum(tight) > 0.9 * len(tight)
    assert all(loose)


def test_same_bits_in_another_process() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch; torch.manual_seed(99); torch.rand(7)\n"
        "from test_models import *\n"
        "print(sha256(b''.join(bits(case) for case in DRAWN[:80])).hexdigest())\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == sha256(b"".join(bits(case) for case in DRAWN[:80])).hexdigest()


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    case = case_of(model={**TOKENS, "padding_idx": 1}, start={"step": 3, "moments": "typical"})
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = bits(case)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert bits(case) == first


def test_the_seed_matters_everywhere() -> None:
    cases = [case_of(seed=seed, start={"step": 2, "moments": "tiny"}) for seed in (0, 1, 1 << 40)]
    assert len({bits(case) for case in cases}) == 3
    assert len({build_model(case).stem.weight.sum().item() for case in cases}) == 3  # type: ignore[operator]


def test_seeds_never_coincide() -> None:
    seeds = {
        seed_of(5, stream, step=step, rank=rank, microbatch=microbatch)
        for stream in range(4)
        for step in (0, 1, 2, 1000)
        for rank in (*range(40), 1023)
        for microbatch in (0, 1, 2, 63)
    }
    assert len(seeds) == 4 * 4 * 41 * 4
    assert all(0 <= seed < 1 << 32 for seed in seeds)


@pytest.mark.parametrize("model", [{}, {"stem": "conv"}, TOKENS, {**TOKENS, "padding_idx": 2}])
@pytest.mark.parametrize("data", [{"batch": 1, "length": 1}, {"batch": 3, "length": 4}])
def test_samples_differ(model: dict[str, Any], data: dict[str, Any]) -> None:
    case = case_of(model=model, data=data, mesh=[4], training={"microbatches": 2})
    seen = set()
    # An alphabet of 5 x 4 pairs holds the 16 microbatches of two steps.
    for step in range(2):
        for rank in range(4):
            for microbatch in range(2):
                sample = batch(case, step=step, rank=rank, microbatch=microbatch)
                again = batch(case, step=step, rank=rank, microbatch=microbatch)
                assert torch.equal(sample.inputs[0], again.inputs[0])
                assert torch.equal(sample.target, again.target)
                assert sample.seed == again.seed
                seen.add((str(sample.inputs[0].tolist()), str(sample.target.tolist())))
    assert len(seen) == 16


def test_samples_have_the_shapes_and_ranges_of_the_case() -> None:
    for case in DRAWN:
        sample = batch(case, step=1, rank=0, microbatch=0)
        shape = (case.data.batch, case.data.length)
        inputs, *side = sample.inputs
        assert len(side) <= case.model.side
        assert all(one.shape == (*shape, 3) for one in side)
        if case.model.stem == "embedding":
            assert inputs.shape == sample.target.shape == shape
            assert inputs.dtype == sample.target.dtype == torch.int64
            assert 0 <= int(inputs.min()) <= int(inputs.max()) < case.model.inputs
            counted = sample.target[sample.target != IGNORED]
            assert len(counted) >= 1
            assert case.data.masked or len(counted) == sample.target.numel()
            assert 0 <= int(counted.min()) <= int(counted.max()) < case.model.outputs
        else:
            assert inputs.shape == (*shape, case.model.inputs)
            assert sample.target.shape == (*shape, case.model.outputs)
            assert inputs.dtype == sample.target.dtype == torch.float32


def test_the_padding_row_has_no_gradient() -> None:
    case = case_of(model={**TOKENS, "padding_idx": 2}, data={"batch": 4, "length": 8})
    model, _ = backward(case)
    weight = model.stem.weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.grad is not None
    assert (weight.grad[2] == 0).all()
    assert (weight[2] != 0).all()
    pads = [(batch(case, step=s, rank=0, microbatch=0).inputs[0] == 2).sum() for s in range(10)]
    assert 20 < sum(map(int, pads)) < 200
    assert (weight.grad[[0, 1, 3, 4, 5]] != 0).any()


def test_the_smallest_vocabularies() -> None:
    for padding in (None, 0):
        case = case_of(model={"stem": "embedding", "inputs": 1, "padding_idx": padding})
        assert int(batch(case, step=0, rank=1, microbatch=0).inputs[0].max()) == 0


def test_a_tied_head_is_one_parameter() -> None:
    case = case_of(model={**TOKENS, "tied": True, "outputs": 6})
    model, _ = backward(case)
    assert model.head.weight is model.stem.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert list(parameter_shapes(case.model)) == ["stem.weight", "head.bias"]


def test_unused_frozen_and_twice() -> None:
    blocks = [{"kind": "mlp"}, {"kind": "conv"}]
    case = case_of(
        model={"blocks": blocks, "calls": [0, 1, 0], "unused": True, "frozen": ["*.conv.*"]}
    )
    model, _ = backward(case)
    parameters = dict(model.named_parameters())
    assert parameters["spare.up.weight"].requires_grad
    assert parameters["spare.up.weight"].grad is None
    assert not parameters["blocks.1.conv.weight"].requires_grad
    once, _ = backward(merged(case, {"model": {"calls": [0, 1]}}, source="test"))
    weight = once.get_parameter("blocks.0.up.weight")
    twice = parameters["blocks.0.up.weight"].grad
    assert weight.grad is not None
    assert twice is not None
    assert not torch.equal(weight.grad, twice)


def test_dropout_follows_the_seed_of_the_microbatch() -> None:
    case = case_of(model={"blocks": [{"kind": "mlp", "dropout": 0.5}]})
    assert torch.equal(backward(case)[1], backward(case)[1])
    model = build_model(case)
    (inputs,) = batch(case, step=0, rank=0, microbatch=0).inputs
    assert not torch.equal(model(inputs), model(inputs))


def test_running_statistics_move_and_begin_with_values_of_their_own() -> None:
    case = case_of(model={"blocks": [{"kind": "batch_norm"}]})
    before = dict(build_model(case).named_buffers())
    after = dict(backward(case)[0].named_buffers())
    assert set(before) == {
        f"blocks.0.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    for name, buffer in before.items():
        assert not torch.equal(buffer, after[name])
    assert (before["blocks.0.norm.running_mean"] != 0).all()
    assert (before["blocks.0.norm.running_var"] > 0).all()


def test_norms_and_attention_compute_what_torch_computes() -> None:
    kinds = ("group_norm", "batch_norm", "layer_norm", "rms_norm", "attention", "conv")
    blocks = [{"kind": kind, "heads": 2} for kind in kinds]
    model = build_model(case_of(model={"blocks": blocks}))
    x = torch.randn(3, 5, 8)
    group, batch_norm, layer, rms, attention, conv = model.blocks
    t = x.transpose(1, 2)
    functional = torch.nn.functional
    norm: Any = group.norm
    want = functional.group_norm(t, 2, norm.weight, norm.bias).transpose(1, 2)
    assert torch.allclose(group(x), want)
    norm = batch_norm.norm
    want = functional.batch_norm(t, None, None, norm.weight, norm.bias, training=True)
    assert torch.allclose(batch_norm(x), want.transpose(1, 2))
    norm = layer.norm
    assert torch.allclose(layer(x), functional.layer_norm(x, (8,), norm.weight, norm.bias))
    norm = rms.norm
    assert torch.allclose(rms(x), functional.rms_norm(x, (8,), norm.weight, 1e-5))
    q, k, v = attention.qkv(x).chunk(3, dim=-1)  # type: ignore[operator]
    heads = [part.reshape(3, 5, 2, 4).transpose(1, 2) for part in (q, k, v)]
    mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(3, 5, 8)
    assert torch.allclose(attention(x), attention.out(mixed), atol=1e-6)  # type: ignore[operator]
    layer_of: Any = conv.conv
    want = functional.conv1d(t, layer_of.weight, layer_of.bias, padding=1).transpose(1, 2)
    assert torch.allclose(conv(x), want)


def test_deep_models_stay_finite() -> None:
    for kind in ("mlp", "attention", "conv"):
        case = case_of(model={"blocks": [{"kind": kind, "residual": True}] * 128})
        model, loss = backward(case)
        assert loss.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("moments", "low", "high"),
    [("zero", 0, 0), ("typical", 1e-3, 1), ("tiny", 1e-13, 1e-12), ("huge", 1e5, 1e6)],
)
def test_start_in_mid_training(moments: str, low: float, high: float) -> None:
    case = case_of(
        model={"blocks": [{"kind": "mlp"}], "unused": True, "frozen": ["stem.*"]},
        start={"step": 255, "moments": moments, "zeros": ["*.bias"]},
        optimizer={"amsgrad": True},
    )
    model = build_model(case)
    state = initial_state(case, model)
    assert state is not None
    expected = set()
    for name, parameter in model.named_parameters():
        roles = ["parameter"]
        if parameter.requires_grad:
            roles += ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
        expected |= {(name, role) for role in roles}
        value = state[name, "parameter"]
        assert value.shape == parameter.shape
        assert bool((value == 0).all()) is name.endswith(".bias")
        if not name.endswith(".bias"):
            assert not torch.equal(value, parameter)
        if not parameter.requires_grad:
            continue
        first, second = state[name, "exp_avg"], state[name, "exp_avg_sq"]
        assert first.shape == second.shape == parameter.shape
        assert low <= float(first.abs().max()) <= high * 1.0001
        assert (second >= 0.5 * first**2).all()
        assert (second > 0).all() or moments == "zero"
        assert (state[name, "max_exp_avg_sq"] >= second).all()
        step = state[name, "step"]
        assert step.dim() == 0
        assert step.dtype == torch.float32
        assert step == 255
    assert set(state) == expected
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


def test_start_at_step_0_has_no_state() -> None:
    case = case_of()
    assert initial_state(case, build_model(case)) is None
    assert case_of(start={"step": 1}).start.moments == "zero"
    case = case_of(start={"step": 1, "moments": "typical"})
    state = initial_state(case, build_model(case))
    assert state is not None
    assert not any(role == "max_exp_avg_sq" for _, role in state)


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    def micros(call: Any) -> float:
        begin = time.perf_counter()
        for case in DRAWN:
            call(case)
        return (time.perf_counter() - begin) / len(DRAWN) * 1e6

    building = micros(build_model)
    sampling = micros(lambda case: batch(case, step=0, rank=0, microbatch=0))
    with capsys.disabled():
        print(f"\n  build_model {building:.0f} us, batch {sampling:.0f} us")


def test_a_bf16_block_has_bf16_parameters_and_casts_what_passes_through() -> None:
    blocks = [
        {"kind": "mlp"},
        {"kind": "batch_norm", "dtype": "bf16"},
        {"kind": "attention", "dtype": "bf16", "residual": True},
    ]
    case = case_of(model={"blocks": blocks}, start={"step": 2, "moments": "typical"})
    model, loss = backward(case)
    narrow = {"fp32": torch.float32, "bf16": torch.bfloat16}
    dtypes = {name: narrow[dtype] for name, dtype in parameter_dtypes(case.model).items()}
    assert dtypes == {name: p.dtype for name, p in model.named_parameters()}
    assert {p.grad.dtype for p in model.blocks[1].parameters()} == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert {b.dtype for b in model.blocks[1].buffers()} == {torch.bfloat16, torch.int64}
    x = torch.randn(2, 3, case.model.width)
    out = model.blocks[2](x)
    assert out.dtype == torch.float32 and torch.equal(out, out.bfloat16().float())


def test_a_state_of_mid_training_has_the_dtype_of_its_parameter() -> None:
    case = case_of(
        model={"blocks": [{"kind": "mlp", "dtype": "bf16"}]},
        start={"step": 2, "moments": "typical"},
        optimizer={"amsgrad": True},
    )
    model = build_model(case)
    parameters = dict(model.named_parameters())
    state = initial_state(case, model)
    assert state is not None
    for (name, role), value in state.items():
        wanted = torch.float32 if role == "step" else parameters[name].dtype
        assert value.dtype == wanted, (name, role)
    for name in parameters:
        assert bool((state[name, "max_exp_avg_sq"] >= state[name, "exp_avg_sq"]).all())
        assert bool((state[name, "parameter"] != 0).all())
