"""Memory of a rank in advance: formulas, known models, and the real code on fake tensors."""
