"""Verdict on a checked step, with its gradient, held against the plain model.

- `adopted.py`: changes that libraries made to a model after it was made, made to the `reference=`
  too
- `exchange.py`: judgement of one checked step: each rank judges its own shards, rank 0 the reports
  of all
- `full_gradient.py`: check of the gradient over the ranks of a live run, with one reference model
  on each
- `gradient_scale.py`: check of the length of the whole gradient, where its elements are too coarse
- `reduced_gradient.py`: the reduced gradient against the local gradients of all ranks, one tensor
  at a time
- `reference.py`: local gradient of the unwrapped model on one device, and its error bound
- `stages.py`: stages of a pipeline: what a stage gets is, bit for bit, what the stage beside it
  sent
- `summation_noise.py`: noise of sums over samples: gradients of outputs, moved as a sum over
  samples may round
- `tied.py`: parameters that stages of a pipeline share: the gradient of each is the sum over them
- `token_weights.py`: weights of tokens in the loss of a step: where they are declared alike, each
  counts as much
- `whole_samples.py`: whole samples, put together from the parts that ranks of an axis have
"""
