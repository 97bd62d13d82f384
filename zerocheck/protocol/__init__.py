"""Data that crosses the border of a rank process; nothing here computes.

- `jobs.py`: requests to a rank, one struct for each kind
- `replies.py`: replies of a rank, to match
- `observations.py`: what a rank observed of a case: tensors, steps, checkpoints
- `measurements.py`: memory, collectives and times of a rank's steps
"""
