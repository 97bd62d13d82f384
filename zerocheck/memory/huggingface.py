"""Model of a config.json of Hugging Face transformers. Imports no torch before a model is built.

Five types need no transformers: their shape is read, and layers are those of `transformer.py`.
Dropout, sliding windows and scaled rotary positions change no size that is counted. Source: the
classes `LlamaConfig`, `MistralConfig`, `MixtralConfig`, `Qwen2Config` and `GPT2Config`, which say
what each key means. Every other model is built by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..catalogue import MODEL_LIBRARY, missing
from ..errors import UsageError, did_you_mean, failing
from .presets import Architecture

CONFIG_ENDING = ".json"
LARGEST = 10_000_000
"""Bound of each number of a config: no model has more of anything."""
MOST_LAYERS = 10_000
MODEL_TYPES = ("gpt2", "llama", "mistral", "mixtral", "qwen2")
"""Types that need no transformers."""


def is_model_config(name: str) -> bool:
    """Return True if MODEL is the path of a config."""
    return name.endswith(CONFIG_ENDING)


def read_architecture(name: str) -> Architecture | None:
    """Read the shape from a config.json; None for a model that transformers must build.

    Raises UsageError if the file cannot be read, or does not describe a model.
    """
    config = _read(name)
    kind = config["model_type"]
    keys = _Keys(name, config)
    if kind not in MODEL_TYPES or any(map(keys.flag, _BIASES.get(kind, ()))):
        return None
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
    if not isinstance(found.get("model_type"), str):
        raise UsageError(f"{name} has no model_type, such as {', '.join(MODEL_TYPES)}")
    return found


def model_of_config(name: str) -> Any:
    """Build the model of a config.json with transformers, on the current device, in fp32.

    It is of the class that the config names, else the one for causal language modeling.

    Raises UsageError if transformers is missing, or does not know the model.
    """
    config = _read(name)
    kind = config["model_type"]
    if reason := missing(MODEL_LIBRARY):
        what = "with biases " if kind in MODEL_TYPES else ""
        raise UsageError(
            f"{name}: model_type {kind!r} {what}{reason} (without it: {', '.join(MODEL_TYPES)})"
        )
    import torch

    transformers: Any = import_module(MODEL_LIBRARY)
    if kind not in transformers.CONFIG_MAPPING:
        near = did_you_mean(kind, [*transformers.CONFIG_MAPPING])
        raise UsageError(
            f"{name}: unknown model_type {kind!r}{near} (allowed: those of transformers "
            f"{transformers.__version__}); for a model of your own give path/to/file.py:factory"
        )
    with failing(f"{name}: transformers cannot build it"):
        parsed = transformers.CONFIG_MAPPING[kind].from_dict(dict(config))
        parsed.get_text_config().use_cache = False  # as in training
        for named in config.get("architectures") or ():
            made: Any = getattr(transformers, str(named), None)
            if hasattr(made, "_from_config"):
                return made._from_config(parsed, dtype=torch.float32)
        return transformers.AutoModelForCausalLM.from_config(
            parsed, dtype=torch.float32, trust_remote_code=False
        )


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


_BIASES = {"llama": ("attention_bias", "mlp_bias")}
"""Keys by which layers have biases, where those of `transformer.py` have none."""


def _of_llama(keys: _Keys, kind: str) -> Architecture:
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
