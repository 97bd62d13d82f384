"""Kill matrix (`zerocheck faults`): every planted fault, run until it is caught.

- `engine.py`: kill matrix: every planted fault, hunted with the cases that a run of it would have
- `hunt.py`: search for one fault: the cases of a run of the faulty code, until it is caught
- `options.py`: options of `zerocheck faults`, checked before anything starts
- `scheduler.py`: concurrent searches on one pool of ranks
"""
