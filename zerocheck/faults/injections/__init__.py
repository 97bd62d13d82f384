"""Faults injected at the collectives: they apply to any implementation, a user's own included.

`zerocheck/catalogue.py` has their names, and how an implementation with one is spelled.

- `call.py`: collective as one rank sees it, whichever operator of torch carries it
- `copies.py`: faults in gathered shards and in broadcasts
- `injection.py`: fault injected at the collectives, and its planting into any implementation
- `races.py`: faults in waiting: the data read depend on timing
- `reductions.py`: faults in the sum over ranks of gradients, and of their norm
"""
