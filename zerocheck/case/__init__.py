"""Case: everything that determines a run, as data. No torch.

- `capabilities.py`: features and mesh axes of a case that an implementation must declare
- `choices.py`: distribution of cases: one class that makes a case out of choices
- `codec.py`: conversion of cases to JSON and plain data, and back, with helpful errors
- `covering.py`: covering arrays: few cases in which every pair of features occurs
- `drawing.py`: drawing of cases by seed: the same ones everywhere, without Hypothesis
- `fitting.py`: removal of options that a case no longer supports after something was taken from it
- `measurement.py`: cases whose memory and collectives can be measured, and from which step on
- `mesh.py`: device mesh with named axes, and what each axis splits
- `optimizer_options.py`: options of optimizers other than AdamW
- `option_set.py`: options that one adapter declares: their values, draws and features
- `options.py`: options that only some implementations have, drawn by the seed of a case
- `patterns.py`: patterns: fields that give a case the features asked for
- `picker.py`: mechanism of making a choice, from any source; `choices.py` lists the choices
- `precision.py`: drawing of a case's precision: by its seed, so that all other choices stay
- `reductions.py`: reductions of a case to simpler ones, in the order that shrinking tries
- `resume.py`: resumed cases: a drawn case with checkpoints and the ranks that load them
- `schema.py`: schema of a case, as frozen data that round-trips through JSON
- `segments.py`: training segments of a resumed case: train, save, load, continue
- `shapes.py`: names and sizes of a case's model, computed without building anything
- `space.py`: space of cases with certain features that an implementation supports
- `tensor_parallel.py`: tensor parallelism of a drawn model: which layers are sharded, and how
- `traits.py`: requirements of a case that several packages must know
- `validity.py`: validity of cases: impossible ones are rejected before any allocation
- `values.py`: values from which the fields of a case are drawn
- `features/`: features: named dimensions of a case
"""
