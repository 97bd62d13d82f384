"""Entries of known issues, written as text."""

from __future__ import annotations

import msgspec


def entry(fingerprint: str, **fields: object) -> str:
    """An entry of a file; field values are written as TOML, which JSON is for texts and lists."""
    lines = ["[[issue]]", f'fingerprint = "{fingerprint}"', 'reason = "known for long"']
    for name, value in fields.items():
        shown = value if name == "case" else msgspec.json.encode(value).decode()
        lines.append(f"{name} = {shown}")
    return "\n".join(lines) + "\n"
