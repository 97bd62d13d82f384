"""Known issues: faults that a run may show without failing.

- `entries.py`: entries of a TOML file of known issues, read and checked
- `releases.py`: releases that have an issue, and those that were measured
- `scope.py`: kinds of tensors and ranks by which an entry is limited
- `known_issues.toml`: the known issues that come with zerocheck
"""
