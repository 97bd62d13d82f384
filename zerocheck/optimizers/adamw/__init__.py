"""AdamW: its step, with bounds and known mistakes.

- `adam.py`: Adam: AdamW on the gradient with the decay added to it
- `bounds.py`: error bounds of a step
- `changes.py`: changes of a step that AdamW or Adam alone may have
- `optimizer.py`: AdamW: its states, its step, and what follows from them
- `ranges.py`: exact range of an update whose moments are hidden, and the moments after it
"""
