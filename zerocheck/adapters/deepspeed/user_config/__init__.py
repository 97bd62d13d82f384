"""DeepSpeed config of the user's own (`ds_config.json`), read and sorted by meaning.

Imports neither torch nor DeepSpeed, so that errors are reported up front.

- `batch.py`: sizes of batches in a DeepSpeed config: those with which DeepSpeed does not start
- `config.py`: whole config, sorted: fields that it fixes in cases, keys of the engine, the rest
- `keys.py`: all keys of DeepSpeed 0.19.8's configuration, and their treatment in a check
- `optimizer.py`: AdamW in a DeepSpeed config: whether the engine makes it, and with which options
- `precision.py`: dtypes in a DeepSpeed config
- `section.py`: values of one object of the config, checked one by one
- `text.py`: parsing of a config file into plain data
- `treatment.py`: keys of one object, sorted by the table of its keys
- `zero.py`: `zero_optimization` in a DeepSpeed config: fields and options of cases, and the rest
"""

from .config import DeepSpeedConfig, read, stage_of

__all__ = ["DeepSpeedConfig", "read", "stage_of"]
