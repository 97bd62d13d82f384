"""Shapes from config.json: the published ones give the published numbers of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zerocheck.cli import main
from zerocheck.errors import UsageError
from zerocheck.memory.huggingface import read_architecture
from zerocheck.memory.presets import PRESETS
from zerocheck.memory.source import source
from zerocheck.memory.transformer import build

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768}
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024,
}  # fmt: skip
NEMO = {
    **MISTRAL, "vocab_size": 131072, "hidden_size": 5120, "num_hidden_layers": 40,
    "head_dim": 128, "max_position_embeddings": 131072,
}  # fmt: skip


def written(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 8_030_261_248),
        (MISTRAL, 7_241_732_096),
        (MIXTRAL, 46_702_792_704),
        (QWEN2, 494_032_768),
        (GPT2, 124_439_808),
        (NEMO, 12_247_782_400),
    ],
    ids=["llama", "mistral", "mixtral", "qwen2", "gpt2", "nemo"],
)
def test_published_numbers(config: dict[str, object], parameters: int, tmp_path: Path) -> None:
    shape = read_architecture(written(tmp_path, config))
    assert shape is not None
    assert shape.elements() == parameters
    small = shape.with_blocks(1)
    assert sum(p.numel() for p in build(small).parameters()) == small.elements()


def test_a_config_gives_the_model_of_the_preset(tmp_path: Path) -> None:
    found = source(written(tmp_path, LLAMA))
    assert found.shape is not None
    names = ("family", "blocks", "width", "heads", "key_value_heads", "hidden", "vocabulary")
    for name in names:
        assert getattr(found.shape, name) == getattr(PRESETS["llama3-8b"], name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "needed is an object"),
        ("[" * 100_000, "is no JSON"),
        ({"hidden_size": 4}, "has no model_type, such as gpt2, llama"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "has no hidden_size"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size is '4096'"),
        ({**LLAMA, "num_hidden_layers": 0}, "needed is a number from 1 to 10,000$"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "needed is a number from 1 to 10,000$"),
        ({**LLAMA, "hidden_size": True}, "needed is a number from 1 to 10,000,000$"),
        ({**LLAMA, "hidden_size": 4097}, "no multiple of 32 heads"),
        ({**LLAMA, "num_key_value_heads": 5}, "no multiple of 5 key-value heads"),
        ({**LLAMA, "tie_word_embeddings": 1}, "needed is true or false"),
    ],
)
def test_configs_that_are_refused(config: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        source(written(tmp_path, config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3' needs transformers"),
        ({**LLAMA, "attention_bias": True}, "model_type 'llama' with biases needs transformers"),
    ],
)
def test_other_models_need_transformers(
    config: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says how to install it. With it: tests/field/test_model_configs.py."""
    monkeypatch.setattr("zerocheck.catalogue.find_spec", lambda name: None)
    path = written(tmp_path, config)
    result = CliRunner().invoke(main, ["memory", path])
    assert result.exit_code == 2 and "Traceback" not in result.output
    said = " ".join(result.output.split())
    assert f"{path}: {words}, which is not installed; install it with: pip install" in said
    assert "'zerocheck-sharding[transformers]' (without it: gpt2, llama, mistral" in said


def test_a_config_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read: No such file"):
        source("nowhere.json")
