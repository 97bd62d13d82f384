"""SGD with momentum: its step, with bounds and known mistakes.

- `bounds.py`: error bounds of a step
- `changes.py`: changes of a step that SGD alone may have
- `optimizer.py`: SGD: its state, its step, and what follows from them
- `ranges.py`: interval of a gradient that is recovered, and of a buffer that is hidden
"""
