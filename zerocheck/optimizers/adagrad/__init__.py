"""Adagrad and RMSprop: steps divided by the root of squares, which are summed or averaged.

- `bounds.py`: error bounds of a step
- `equations.py`: lines of a step as sums of terms, with inputs replaced
- `optimizer.py`: Adagrad and RMSprop: their states, their step, and what follows from them
- `variants.py`: known causes of a wrong update
"""
