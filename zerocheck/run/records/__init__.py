"""Records of a run, and what is counted over them; reports read nothing else of a run.

- `case_counts.py`: text of what became of the cases of a run
- `coverage.py`: coverage of a run: pairs of features exercised, and why the rest were not
- `exercised.py`: features that a judged case exercised: what they can break could have failed
- `finding_text.py`: text of a finding, in the same words everywhere
- `footprint.py`: memory and communication of measured cases, next to the ZeRO paper
- `journal.py`: journal of a run: one record per line (NDJSON), written the moment it is known
- `loads.py`: results of the loads of resumed cases, by world size
- `margins.py`: margins of an obligation: how near to its bound each case came
- `matrix_records.py`: records of the kill matrix: one per line of its journal
- `matrix_summary.py`: summary of the records of a kill matrix
- `previous_runs.py`: earlier runs in a report directory: kept, while foreign files are not touched
- `records.py`: records of a run: one per line of the journal, as data that round-trips
- `tally.py`: counts over the records of a run
"""
