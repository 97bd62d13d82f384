"""DeepSpeed config of the user's own (`ds_config.json`), read and sorted by meaning.

Imports neither torch nor DeepSpeed, so that errors are reported up front.

- `batch.py`: sizes of batches in a DeepSpeed config: those with which DeepSpeed does not start
- `config.py`: whole config, sorted: fields that it fixes in cases, keys of the engine, the rest
- `keys.py`: all keys of DeepSpeed 0.19.8's configuration, and their treatment in a check
- `optimizer.py`: AdamW in a DeepSpeed config: whether the engine makes it, and with which options
- `precision.py`: dtypes in a DeepSpeed config
- `zero.py`: `zero_optimization` in a DeepSpeed config: fields and options of cases, and the rest
"""

from .config import DeepSpeedConfig, code_of, read
from .zero import simulated_sizes

__all__ = ["DeepSpeedConfig", "code_of", "read", "simulated_sizes"]
