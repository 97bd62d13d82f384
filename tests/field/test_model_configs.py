"""Models of `config.json` that transformers builds: their sizes, blocks and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.memory.analyse import analyse
from zerocheck.memory.huggingface import model_of_config, read_architecture
from zerocheck.memory.setup import Setup
from zerocheck.memory.source import source

SMALL = {
    "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
    "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**GROUPED, "head_dim": 16, "dtype": "bfloat16"},
    "qwen3_moe": {**GROUPED, **EXPERTS, "head_dim": 16},
    "gemma3_text": {**GROUPED, "head_dim": 16},
    "phi3": GROUPED,
    "gpt_neox": SMALL,
    "bert": {**SMALL, "architectures": ["BertForMaskedLM"]},
    "llama": {**GROUPED, "attention_bias": True},
}


def written(folder: Path, kind: str, **config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    return str(path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_steps_of_each_kind_of_model(kind: str, tmp_path: Path) -> None:
    name = written(tmp_path, kind, **CONFIGS[kind])
    report = analyse(Setup(model=name, world_size=4, sequence=32), exact=True)
    assert report.blocks == 8 and report.reserved is not None
    model = source(name).build()
    assert report.elements == sum(one.numel() for one in model.parameters())
    # Weights in fp32, whatever the config says: 16 Psi/N.
    assert report.between.padding is not None
    assert 0 <= report.between.padding < 0.05 * report.between.held
    named = CONFIGS[kind].get("architectures", [""])[0]
    assert type(model).__name__.endswith(named or "ForCausalLM")


def test_blocks_of_a_qwen3_are_extrapolated(tmp_path: Path) -> None:
    """Qwen3-0.6B, whose numbers are published: 0.6B parameters, 0.44B of them not in embeddings."""
    name = written(
        tmp_path, "qwen3", num_hidden_layers=28, hidden_size=1024, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    few, every = (
        analyse(Setup(model=name, sequence=128, checkpoint=True), exact=exact)
        for exact in (False, True)
    )
    assert few.elements == 596_049_920 and few.elements - 151936 * 1024 == 440_467_456
    assert few.simulated and not every.simulated
    assert few.peak == every.peak and few.lines == every.lines


def test_a_built_in_type_holds_what_transformers_would(tmp_path: Path) -> None:
    config = {**GROUPED, "num_key_value_heads": 2}
    name = written(tmp_path, "llama", **config)
    assert read_architecture(name) is not None
    ours, theirs = (
        sum(one.numel() for one in model.parameters())
        for model in (source(name).build(), model_of_config(name))
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("qwen33", {}, "unknown model_type 'qwen33'; did you mean 'qwen3'?"),
        ("qwen3", {"hidden_size": "many"}, "transformers cannot build it: "),
        ("clip", {}, "transformers cannot build it: ValueError: Unrecognized configuration class"),
    ],
)
def test_configs_that_are_refused(
    kind: str, config: dict[str, object], words: str, tmp_path: Path
) -> None:
    name = written(tmp_path, kind, **config)
    with pytest.raises(UsageError) as refused:
        source(name).build()
    assert words in str(refused.value)
    result = CliRunner().invoke(main, ["memory", name])
    assert result.exit_code == 2 and "Traceback" not in result.output
