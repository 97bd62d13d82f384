"""Memory beforehand: formulas, known models, and the real code on tensors without data."""
