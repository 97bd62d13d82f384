"""Shape of a model from the config.json of Hugging Face transformers. Imports no torch.

Source: the classes `LlamaConfig`, `MistralConfig`, `MixtralConfig`, `Qwen2Config` and `GPT2Config`
of transformers, which say what each key means. Layers are those of `transformer.py`; dropout,
sliding windows and scaled rotary positions change no size that is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError, unknown
from .presets import Architecture

CONFIG_ENDING = ".json"
LARGEST = 10_000_000
"""Bound of each number of a config: no model has more of anything."""
MOST_LAYERS = 10_000
MODEL_TYPES = ("gpt2", "llama", "mistral", "mixtral", "qwen2")


def is_model_config(name: str) -> bool:
    """Return True if MODEL is the path of a config."""
    return name.endswith(CONFIG_ENDING)


def read_architecture(name: str) -> Architecture:
    """Read the shape from a config.json.

    Raises UsageError if the file cannot be read, or describes a model that is not known.
    """
    config = _read(name)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{name} has no model_type; known are {', '.join(MODEL_TYPES)}")
    if kind not in MODEL_TYPES:
        error = unknown("model_type", kind, MODEL_TYPES)
        raise UsageError(f"{name}: {error}; for others give path/to/file.py:factory")
    keys = _Keys(name, config)
    shape = _of_gpt2(keys) if kind == "gpt2" else _of_llama(keys, kind)
    if shape.width % shape.heads and shape.head_size is None:
        raise UsageError(f"{name}: a width of {shape.width} is no multiple of {shape.heads} heads")
    if shape.heads % shape.key_value_heads:
        raise UsageError(
            f"{name}: {shape.heads} heads are no multiple of {shape.key_value_heads} key-value "
            "heads"
        )
    return shape


def _read(name: str) -> Mapping[str, Any]:
    path = Path(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{name} is a {type(found).__name__}; needed is an object with model_type")
    return found


class _Keys:
    """Keys of a config, checked when they are read."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, config

    def count(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """Return a number from 1 to `most`."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UsageError(f"{self.name} has no {key}")
        if type(value) is not int or not 1 <= value <= most:
            raise UsageError(
                f"{self.name}: {key} is {value!r}; needed is a number from 1 to {most:,}"
            )
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{self.name}: {key} is {value!r}; needed is true or false")
        return value


def _of_gpt2(keys: _Keys) -> Architecture:
    width, heads = keys.count("n_embd"), keys.count("n_head")
    return Architecture(
        family="gpt",
        blocks=keys.count("n_layer", most=MOST_LAYERS),
        width=width,
        heads=heads,
        key_value_heads=heads,
        hidden=keys.count("n_inner", 4 * width),
        vocabulary=keys.count("vocab_size"),
        positions=keys.count("n_positions"),
        tied=keys.flag("tie_word_embeddings", default=True),
        source=keys.name,
    )


def _of_llama(keys: _Keys, kind: str) -> Architecture:
    for bias in ("attention_bias", "mlp_bias"):
        if kind == "llama" and keys.flag(bias):
            raise UsageError(
                f"{keys.name}: {bias} is true, and the layers here have none; give "
                "path/to/file.py:factory"
            )
    heads = keys.count("num_attention_heads")
    experts = kind == "mixtral"
    return Architecture(
        family="llama",
        blocks=keys.count("num_hidden_layers", most=MOST_LAYERS),
        width=keys.count("hidden_size"),
        heads=heads,
        key_value_heads=keys.count("num_key_value_heads", heads if kind == "llama" else None),
        hidden=keys.count("intermediate_size"),
        vocabulary=keys.count("vocab_size"),
        positions=keys.count("max_position_embeddings"),
        tied=keys.flag("tie_word_embeddings"),
        head_size=keys.count("head_dim", 0) or None,
        query_bias=kind == "qwen2",
        experts=keys.count("num_local_experts") if experts else 0,
        active_experts=keys.count("num_experts_per_tok") if experts else 0,
        source=keys.name,
    )
