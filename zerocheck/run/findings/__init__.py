"""Findings: one for each bug, with its smallest case and its extent.

- `bug.py`: bug of a run: all failing cases that it explains, and what is said of it
- `case_file.py`: case files, which findings leave behind for `zerocheck replay`
- `confirmation.py`: confirmation of findings in freshly started rank processes, with counts
- `consequences.py`: violations that follow from others: of one bug only the source is a finding
- `contrast.py`: what wrong cases and tensors have, and right ones have not
- `crash_watch.py`: watch for implementations that crash alike in every case
- `extent.py`: extent of a bug, in one sentence: the features it needs, its ranks, its parameters
- `findings.py`: findings from failing cases: one bug is one finding
- `issue_matcher.py`: known-issue matcher of one run: cases added or left out, stale issues
- `parting.py`: variants of a case that tell apart what it cannot
- `recorder.py`: recorder of findings: a case file and a record of each
- `shrink.py`: reduction of a failing case to the smallest one that fails in the same way
- `suspicion.py`: failures that no fresh rank processes show, and whether they count
"""
