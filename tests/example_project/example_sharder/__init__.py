"""Sharding of a project that is checked with zerocheck."""
