"""TrainingArguments in a file, read and sorted by meaning.

Imports neither torch nor transformers, so that errors are reported up front.

- `config.py`: whole file, sorted: fields that it fixes in cases, arguments of the Trainer, the rest
- `deepspeed.py`: DeepSpeed config of TrainingArguments, with "auto" filled in
- `keys.py`: all fields of transformers 5.23.0's TrainingArguments, and their treatment in a check
- `optimizer.py`: optimizer of TrainingArguments, as fields of cases
"""

from .config import TrainerConfig, code_of, read, recognises

__all__ = ["TrainerConfig", "code_of", "read", "recognises"]
