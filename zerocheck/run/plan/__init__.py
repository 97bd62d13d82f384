"""Plan of a run: its options, and the choice of its cases.

- `covering_array.py`: covering array of one implementation, with replacements for refused cases
- `draws.py`: cases of a run that are drawn, and not chosen for their pairs of features
- `fixed_fields.py`: limits of an implementation's cases: fixed fields, and mesh axes
- `options.py`: options of a run, checked before anything starts
- `plan.py`: plan of a run: its cases and their order
- `profiles.py`: profiles: cases of a run, their number, and world sizes
- `replacements.py`: further cases for features that cases had, and could break nothing by
- `settings.py`: settings of a run that a project keeps: command line, pytest and TOML
- `run_shard.py`: shard of a run: the part of its cases that one of several machines takes
- `streams.py`: streams of drawn cases that continue until enough of them can be run
"""
