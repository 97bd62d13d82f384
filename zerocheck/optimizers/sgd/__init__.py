"""SGD with momentum: its step, with bounds and known mistakes.

- `bounds.py`: error bounds of a step
- `equations.py`: lines of SGD's step as sums of terms, with inputs replaced
- `optimizer.py`: SGD: its state, its step, and what follows from them
- `ranges.py`: interval of a gradient that is recovered, and of a buffer that is hidden
- `variants.py`: known causes of a wrong update
"""
