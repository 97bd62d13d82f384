"""Config of LightningCLI, read and sorted by meaning.

Imports neither torch nor Lightning, so that errors are reported up front.

- `config.py`: whole file, sorted: fields that it fixes in cases, the strategy, the rest
- `deepspeed.py`: DeepSpeed config that Lightning's DeepSpeedStrategy makes of its arguments
- `keys.py`: all keys of lightning 2.6.6's Trainer and strategies, and their treatment in a check
- `strategy.py`: strategy of a Trainer, by its name or by its class with arguments
"""

from .config import LightningConfig, code_of, read, recognises

__all__ = ["LightningConfig", "code_of", "read", "recognises"]
