"""Checks of chosen steps of a real training run, and the replay of their findings.

- `arrivals.py`: agreement of all ranks, at the end of a step, on whether each of them reached it
- `attach.py`: `zerocheck.attach`: checks of chosen steps of a running training script
- `bundle.py`: bundle of one step, violated or recorded: JSON and safetensors, and no code
- `comparison.py`: comparison of the same step in two jobs: round-off or a bug, tensor by tensor
- `options.py`: options of `zerocheck.attach`, checked
- `recorded_steps.py`: steps between the checked ones, kept by the flight recorder where one is
  asked for
- `recorder.py`: flight recorder: the steps since the last one that was judged, in a ring on disk
- `replay.py`: replay of the bundle of a checked step: one process, no ranks
- `resume.py`: checkpoints and data of a run: what is loaded was saved, and no sample comes twice
- `same_model.py`: comparison of the models of all ranks: a sharded or replicated run has only one
- `session.py`: session of an attached run: which steps are observed, and what is done with each
- `step_context.py`: contexts of `check.step()`: of a step that is observed, and of one that is not
- `summary.py`: count of the checked steps of a run, and the sentences at its end
- `text.py`: text of a checked step, in the words of a finding of `zerocheck run`
- `violated.py`: consequences of a wrong step: its first wrong step is found, kept, printed, and
  raised
- `checks/`: obligations of a checked step: of the shards of one rank, and of all ranks
- `record/`: record of a step of a live run: what a rank holds, and what its model was called with
- `saves/`: record of what a run saved, compared with what it loads; the samples of an epoch
- `verdict/`: verdict on a checked step, with its gradient, held against the plain model
- `watching/`: observation of a live step: hooks from its beginning to its end
"""
