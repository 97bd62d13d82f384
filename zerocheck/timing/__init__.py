"""Timings of steps, of a case or of a job: their figures, and what they point to.

- `analysis.py`: pace of steps, from the times of the ranks
- `pace.py`: figures of a pace, as the journal holds them, and the words for what they point to
"""
