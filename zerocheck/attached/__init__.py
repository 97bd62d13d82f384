"""Checks of chosen steps of a real training run, and the replay of their findings.

- `adopted.py`: changes that libraries made to a model after it was made, made to the `reference=`
  too
- `after_clipping.py`: check that the optimizer is given the clipped gradient, and nothing has
  changed it since
- `arrivals.py`: agreement of all ranks, at the end of a step, on whether each of them reached it
- `attach.py`: `zerocheck.attach`: checks of chosen steps of a running training script
- `axes.py`: axes of a job: what each dimension of its device mesh splits, and what follows from
  that
- `bundle.py`: bundle of one step, violated or recorded: JSON and safetensors, and no code
- `call_state.py`: state of a model that its calls depend on: random states, numbers of its modules
- `calls.py`: calls of a model as data: JSON for their form, and tensors by name
- `casts.py`: casts of FSDP and of DDP's hooks: which a model has, and the same in a model that is
  not wrapped
- `clip_hooks.py`: hooks into the clipping of gradients in a step: what was clipped, to which limit
- `comm_hooks.py`: communication hooks of DDP: the dtype in which one reduces, or why its gradient
  is not judged
- `comparison.py`: comparison of the same step in two jobs: round-off or a bug, tensor by tensor
- `copies.py`: obligation of all ranks: replicas are equal bit for bit
- `cross_rank_checks.py`: obligations that need all ranks: ownership, agreement on the step, and
  the norm
- `digests.py`: digests of tensors that do not depend on how they are sharded
- `dtypes.py`: dtypes by their names, as records and bundles have them
- `exchanges.py`: collectives that a model calls in its forward and backward, beyond those of
  what wraps it
- `exchange.py`: judgement of one checked step: each rank judges its own shards, rank 0 the
  reports of all
- `forwards.py`: calls of a model in a checked step: inputs, random state, gradients that come to
  the outputs
- `full_gradient.py`: check of the gradient over the ranks of a live run, with one reference model
  on each
- `gradient_scale.py`: check of the length of the whole gradient, where its elements are too coarse
- `guard.py`: replace functions for a step, and keep errors of the observation out of the
  training
- `holdings.py`: shards of a live model on this rank, read from the local tensors and never from
  an export
- `joint_context.py`: context of a checked step on all ranks
- `loaded.py`: obligation of a load: what was loaded is what was saved, on any number of ranks
- `model_hooks.py`: hooks of the script that change what a model computes, or its gradients
- `norms.py`: check of the gradient norm that ranks report when they clip: each element counts
  once
- `not_finite.py`: first value of a step that is not finite: phase, rank, microbatch, module
- `optimizers.py`: optimizers of a job: one or several, around others too
- `options.py`: options of `zerocheck.attach`, checked
- `output_gradients.py`: gradients that enter at the outputs of a model, read from the autograd
  graph
- `rank_checks.py`: obligations that a rank judges by its own shards: update and clip
- `published_copies.py`: obligation of engines with masters: after a step the parameters are the
  masters, cast
- `ranks.py`: communication between the ranks of a live run: bytes and sums, and no pickles
- `recorded_steps.py`: steps between the checked ones, kept by the flight recorder where one is
  asked for
- `recorder.py`: flight recorder: the steps since the last one that was judged, in a ring on disk
- `reduced_gradient.py`: the reduced gradient against the local gradients of all ranks, one tensor
  at a time
- `reference.py`: local gradient of the unwrapped model on one device, and its error bound
- `ranks_own.py`: parameters that differ between ranks by design, such as experts
- `repeatable.py`: whether a model gives the same outputs for the same inputs and random states
- `replay.py`: replay of the bundle of a checked step: one process, no ranks
- `resume.py`: checkpoints and data of a run: what is loaded was saved, and no sample comes twice
- `run_parameters.py`: parameters of a live run and the places of their shards, from what its ranks
  report
- `same_model.py`: comparison of the models of all ranks: a sharded or replicated run has only one
- `script_changes.py`: changes that a script makes to gradients between the end of their
  reduction and the step
- `samples.py`: samples that a run is given: none comes twice in an epoch, on any rank
- `saved_state.py`: record of the state that was saved, and its comparison with what was loaded
- `session.py`: session of an attached run: which steps are observed, and what is done with each
- `slices.py`: context of a checked step on one rank: its own shards, in slices that fit in memory
- `step_context.py`: contexts of `check.step()`: of a step that is observed, and of one that is not
- `step_record.py`: record of one checked step on one rank: small structured data, and the tensors
  that it names
- `summation_noise.py`: noise of sums over samples: gradients of outputs, moved as a sum over
  samples may round
- `summary.py`: count of the checked steps of a run, and the sentences at its end
- `text.py`: text of a checked step, in the words of a finding of `zerocheck run`
- `violated.py`: consequences of a wrong step: its first wrong step is found, kept, printed, and
  raised
- `token_weights.py`: weights of tokens in the loss of a step: where they are declared alike, each
  counts as much
- `used_gradients.py`: gradients that an optimizer has used, until they are cleared or added to
- `watch.py`: observe one step: copy the state around it, and the gradient where the optimizer
  takes it
- `whole_samples.py`: whole samples, put together from the parts that ranks of an axis of the
  sequence have
- `workers.py`: threads that judge the shards of a step: the cores of the host, divided among its
  ranks
- `zero_engine.py`: engine with ZeRO stages 1 to 3, as DeepSpeed has them: it updates fp32 masters
  in partitions
"""
