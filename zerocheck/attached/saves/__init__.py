"""Record of what a run saved, compared with what it loads; the samples of an epoch.

- `in_files.py`: state in the files of a checkpoint or an export, with digests as a record has them
- `loaded.py`: obligation of a load: what was loaded is what was saved, on any number of ranks
- `published.py`: weights that another process computes with, compared with those that were trained
- `relations.py`: names of tensors in an engine or an export, and those in training that make them
- `samples.py`: samples that a run is given: none comes twice in an epoch, on any rank
- `saved_state.py`: record of the state that was saved, and its comparison with what was loaded
"""
