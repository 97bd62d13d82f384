"""Muon: momentum that is orthogonalized, next to AdamW for what is no matrix.

- `bounds.py`: error bounds of a step
- `changes.py`: changes of a step that Muon alone may have
- `optimizer.py`: Muon: its state, its step, and what follows from them
- `pair.py`: Muon for matrices and AdamW for all else, as one optimizer of a case
"""
