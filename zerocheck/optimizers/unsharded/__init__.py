"""Optimizers of torch that are their own reference: a step of one, unsharded, run by torch.

- `catalogue.py`: which of torch's optimizers these are, with their states and options
- `changes.py`: changes of such a step: shards taken for wholes
- `optimizer.py`: optimizer whose step is computed by running it
- `part_norms.py`: step in which a norm over all of a parameter is that of a part
- `reference.py`: state and options of such an optimizer for free runs
- `step.py`: one step run alone on whole vectors, with the round-off of its operators
"""
