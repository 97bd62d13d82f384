"""Record of a step of a live run: what a rank holds, and what its model was called with.

- `axes.py`: axes of a job: what each dimension of its device mesh splits, and what follows from
  that
- `call_state.py`: state of a model that its calls depend on: random states, numbers of its modules
- `calls.py`: calls of a model as data: JSON for their form, and tensors by name
- `casts.py`: casts of FSDP and of DDP's hooks: which a model has, and the same in a model that is
  not wrapped
- `comm_hooks.py`: communication hooks of DDP: the dtype in which one reduces, or why its gradient
  is not judged
- `digests.py`: digests of tensors that do not depend on how they are sharded
- `dtypes.py`: dtypes by their names, as records and bundles have them
- `forwards.py`: calls of a model in a checked step: inputs, random state, gradients that come to
  the outputs
- `guard.py`: replace functions for a step, and keep errors of the observation out of the training
- `holdings.py`: shards of a live model on this rank, read from the local tensors and never from an
  export
- `model_hooks.py`: hooks of the script that change what a model computes, or its gradients
- `optimizers.py`: optimizers of a job: one or several, around others too
- `output_gradients.py`: gradients that enter at the outputs of a model, read from the autograd
  graph
- `ranks.py`: communication between the ranks of a live run: bytes and sums, and no pickles
- `ranks_own.py`: parameters that differ between ranks by design, such as experts
- `repeatable.py`: whether a model gives the same outputs for the same inputs and random states
- `run_parameters.py`: parameters of a live run and the places of their shards, from what its ranks
  report
- `step_record.py`: record of one checked step on one rank: small structured data, and the tensors
  that it names
- `zero_engine.py`: engine with ZeRO stages 1 to 3, as DeepSpeed has them: it updates fp32 masters
  in partitions
"""
