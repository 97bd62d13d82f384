"""Verification of the reference trainer: independent oracles, derived bounds, torch's own AdamW."""
