"""Adagrad and RMSprop: steps divided by the root of squares, which are summed or averaged.

- `bounds.py`: error bounds of a step
- `changes.py`: changes of a step that Adagrad or RMSprop alone may have
- `optimizer.py`: Adagrad and RMSprop: their states, their step, and what follows from them
"""
