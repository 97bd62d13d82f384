"""Reports: one file per format, and the words that several formats share.

- `checks.py`: results of the pytest tests: one per obligation and group of features
- `comparison.py`: comparison of a run with an earlier one (`--against`)
- `comparison_text.py`: text of a comparison: on the console, in against.md and against.json
- `conformance.py`: report conformance.md: implementation x feature x obligation
- `coverage.py`: text of coverage: pairs of features, those not exercised, vacuous obligations
- `drift.py`: text of free runs: drift of implementations, next to a replica of the reference
- `faults_json.py`: report faults.json: the kill matrix for machines
- `faults_markdown.py`: report faults.md: the kill matrix for people
- `faults_text.py`: text of a row of the kill matrix, on the console and in Markdown
- `footprint.py`: text of bytes and communication, next to those of the ZeRO paper
- `github.py`: output of a run for GitHub Actions: annotations, and the summary of the job
- `json_report.py`: report report.json: the form for machines
- `junit.py`: report junit.xml: one test case per implementation and obligation, for CI servers
- `known_faults.py`: known faults that showed: findings of one fault together, by severity
- `known_issues.py`: text of known issues: observed, stale, left out
- `loads.py`: text of the loads of resumed cases
- `markdown.py`: report report.md: the form for people, on a page that renders Markdown
- `metrics.py`: text of the runtime metrics of timed cases
- `peaks.md.j2`: template of the page of `peaks.py`
- `peaks.py`: page and picture of a step's peak memory over wrapping, prefetching and buckets
- `peaks.svg.j2`: template of the picture of `peaks.py`
- `progress.py`: console of a run, a matrix that fills in or plain lines, and of a hunt for faults
- `releases.py`: page releases.md of several runs, each with another release
- `sections.py`: sections that several formats share: environment, observability, leaked state
- `text.py`: text of a finding, in the same words in every format
- `write.py`: output of every report format into one directory
- `html/`: report.html
"""
