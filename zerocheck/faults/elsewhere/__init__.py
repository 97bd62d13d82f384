"""Bugs of other frameworks, planted to measure a diagnosis that did not know them.

- `checkpoints.py`: faults in what a load takes from a checkpoint, or in what was written
- `copies.py`: faults in updates, in the copies that ranks compute with, in buffers, shapes and
  memory
- `gradients.py`: faults in the accumulation, the reduction, the norm and the clipping of gradients
"""
