"""DeepSpeed config of the user's own (`ds_config.json`), read and sorted by meaning.

text      from the file to plain data
keys      every key of DeepSpeed's configuration, and what becomes of it
section   values of one object of it, checked one by one
precision, optimizer, zero
          what it says of dtypes, of AdamW, and of sharding
sorting   all of it: fields of cases that it fixes, what the engine is given as it stands, what is
          left out, and what is refused

Imports neither torch nor DeepSpeed, so that errors are reported up front.
"""

from .config import DeepSpeedConfig, read, stage_of

__all__ = ["DeepSpeedConfig", "read", "stage_of"]
