"""Version of zerocheck, and the name under which it is installed."""

__version__ = "0.1.0"

DISTRIBUTION = "zerocheck-sharding"
"""Name of the distribution. On the package index, `zerocheck` is an unrelated project."""


def install_extra(extra: str) -> str:
    """Return the command that installs an extra into the environment that has zerocheck."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
