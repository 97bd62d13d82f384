"""Data that crosses the border of a rank process, and verdicts on it; nothing here computes.

- `jobs.py`: requests to a rank, one struct for each kind
- `replies.py`: replies of a rank, one struct for each kind
- `observations.py`: tensors, steps and checkpoints that a rank observed
- `layout.py`: prediction of an implementation's memory and collectives: exact, per rank
- `measurements.py`: memory and collectives of a rank's steps
- `verdicts.py`: obligations, violations, and the judgement of a case
"""
