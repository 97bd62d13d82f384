"""Version of zerocheck: what journals record, and the package is built as."""

__version__ = "0.1.0"
