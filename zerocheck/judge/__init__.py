"""Judge: every step of every rank against the reference, by derived bounds.

`case.py` goes through the steps of a case and `resume.py` through the training segments of a
resumed one. Both judge the same obligations, each with a context that computes on demand.

- `assemble.py`: whole flat vectors, one per role and point, assembled from the records of each
  rank
- `bounds.py`: error bounds of gradients and norms: the distance of a correct execution from the
  exact result
- `case.py`: judge of one case: induction over its steps
- `checkpoint.py`: what is loaded is what was saved, bit for bit, and saving changes nothing
- `clipping.py`: norm and clipping of a gradient, with the bounds of both
- `compare.py`: comparison of observed values with their enclosures, and the worst element outside
- `context.py`: contexts in which obligations are judged: a case, and one step of it, computed on
  demand
- `digest.py`: hash of all observations, so that a replay can be declared identical bit for bit
- `estimate.py`: estimated round-off of right executions whose kernels are not those of the
  reference
- `expected.py`: enclosure of the reduced gradient: all local gradients, summed over the declared
  divisor
- `flat.py`: flat buffers of an implementation: parameters end to end, and the owner of each
  element
- `footprint.py`: memory and communication of a case's ranks, for reports, which compare it with
  `paper`
- `hidden.py`: recovery of a gradient that the implementation does not expose, from the first
  moment
- `hidden_states.py`: judging an optimizer that exposes no states by its parameters
- `layout.py`: layout of a model in a flat vector per role: the place of each parameter
- `load_attempts.py`: obligations on a checkpoint whose writer was killed, or whose files were
  damaged
- `local.py`: local gradients of every rank and microbatch, computed by the reference on one
  device
- `manifest_plan.py`: where the elements of a rank's shards lie in the flat vector, and what all
  ranks cover of it
- `measurements.py`: obligations of MEMORY, from the bytes that the ranks of one case held and
  sent
- `mirrors.py`: properties of a rank's execution, applied to the reference so that local gradients
  agree in bits
- `obligation.py`: interface of an obligation: a name, what must have been observed, and a check
  that yields
- `owners.py`: gradients of which only the owner's copy counts, where the owners are not known
- `ownership.py`: the shards of every tensor tile it exactly once, replicas aside
- `perturbation.py`: perturbation of the reference by a round-off: of parameters, and of module
  outputs
- `pieces.py`: processing of large vectors one piece at a time, so that temporaries are of a
  piece's size
- `placement.py`: bytes that a rank may hold by its declared stage and its shards, without a layout
- `precision.py`: roundings of mixed precision: formats of local gradients, their sum and their
  reduction
- `rank_device.py`: device that the ranks ran on, and checks that its results repeat bit for bit
- `recipe.py`: update to judge, and the optimizer with its options that must have made it
- `recovery.py`: checks of a step whose (clipped) gradient was recovered from optimizer states
- `redrawn.py`: reference with activation checkpointing that loses the random state: a known bug
- `resume.py`: obligations of a resumed case: saved, exported and loaded state, and the steps
  after a load
- `shares.py`: share of the parameters, gradients and optimizer states that one rank holds
- `skip.py`: part of the obligation update: all ranks skip a step if and only if it must be
  skipped
- `state.py`: state of an implementation at one moment, assembled from all ranks
- `step_replay.py`: reference forwards and backwards of all ranks in one step, from the
  observations
- `tolerance.py`: tolerance of local results: their distance from the reference that right code
  may have
- `update.py`: given state and observed gradient, the next state lies in its enclosure
- `uses.py`: parts of a gradient that single uses of a parameter in a forward give
- `vacuity.py`: vacuous obligations of a case: those that hold where nothing could fail
- `vectors.py`: whole vectors of a large model: in memory while a quarter of it is left, else in
  files
- `verdicts.py`: verdicts on the obligations of a case, as they are judged one after the other
- `words.py`: other words of the declared semantics under which a violated case holds
- `wrong_update.py`: cause and attribution of a wrong update, as a violation
- `attribution/`: what wrong values are made of, without a list of known bugs
- `diagnose/`: causes of a violation: each known bug, computed and compared
- `obligations/`: obligations of a step and of a measurement, one file each
"""
