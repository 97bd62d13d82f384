"""Checks of existing checkpoints: content, errors, differences between two."""
