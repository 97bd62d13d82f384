"""Config of `accelerate config`, read and sorted by meaning.

Imports neither torch nor accelerate, so that errors are reported up front.

- `config.py`: whole config, sorted: fields that it fixes in cases, what is left out, what is said
- `fsdp.py`: FSDP as accelerate is asked for it, in a config or in TrainingArguments
- `keys.py`: all keys of accelerate 1.15.0's config, and their treatment in a check
"""

from .config import AccelerateConfig, code_of, read, recognises

__all__ = ["AccelerateConfig", "code_of", "read", "recognises"]
