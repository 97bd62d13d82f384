"""Bugs of other frameworks, planted to measure a diagnosis that did not know them.

- `checkpoints.py`: faults in what a load takes from a checkpoint, or in what was written
- `copies.py`: faults in the copies that ranks compute with, in buffers, and in exposed shapes
- `gradients.py`: faults in the accumulation and reduction of gradients
- `memory.py`: faults of memory: every number is right, and a rank holds more than it should
- `norms.py`: faults in the norm of the gradient and in clipping
- `updates.py`: faults in the update: its learning rate, its step count, what it reaches
"""
