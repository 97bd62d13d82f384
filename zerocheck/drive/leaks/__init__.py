"""Global state that a job leaves changed in its rank process, which runs other code afterwards.

`guard` goes around every job: it compares `torch_settings`, `process_settings`, `patches`
(functions, hooks, environment variables) and `groups` (process groups, collectives) with the state
before, undoes what can be undone exactly, and says what it found. Ranks that it cannot clean are
replaced.
"""
