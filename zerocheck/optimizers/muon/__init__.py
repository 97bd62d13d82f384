"""Muon: momentum that is orthogonalized, next to AdamW for what is no matrix.

- `bounds.py`: error bounds of a step
- `equations.py`: lines of Muon's step as sums of terms, with inputs replaced
- `optimizer.py`: Muon: its state, its step, and what follows from them
- `pair.py`: Muon for matrices and AdamW for all else, as one optimizer of a case
- `variants.py`: known causes of a wrong update
"""
