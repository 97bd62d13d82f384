"""Engine of a run: choice of cases, execution, findings, records.

- `engine.py`: engine: plans cases, runs and judges them, sends records to its handlers
- `replay.py`: replay of one case, as in a case file, in fresh rank processes

The packages, each of which imports those above it only:

- `records/`: records of a run, and what is counted over them
- `known_issues/`: faults that a run may show without failing
- `plan/`: options of a run, and the choice of its cases
- `execute/`: execution of cases on rank processes, and the outcome of each
- `findings/`: one finding for each bug, with its smallest case and its extent
"""
