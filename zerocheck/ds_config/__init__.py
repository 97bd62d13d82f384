"""DeepSpeed config of the user's own (`ds_config.json`), read and sorted by meaning."""

from .sorting import Given, read, stage_of

__all__ = ["Given", "read", "stage_of"]
