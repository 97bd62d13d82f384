"""Faults injected at the collectives: they apply to any implementation, a user's own included.

`zerocheck/catalogue.py` has their names, and how an implementation with one is spelled.

- `call.py`: collective as one rank sees it, whichever operator of torch carries it
- `collectives.py`: faults in sums, in gathers and broadcasts, and in waiting
- `injection.py`: fault injected at the collectives, and its planting into any implementation
"""
