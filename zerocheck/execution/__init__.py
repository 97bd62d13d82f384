"""Properties of an execution that decide the last bits: ranks observe them, the judge mirrors them.

- `kernels.py`: settings that make kernels reproducible
- `alignment.py`: addresses and strides of tensors
- `graph.py`: a fingerprint of the computation behind a tensor
- `operator_noise.py`: round-off of every operator of a computation, moved at random, and what that
  changes
"""
