"""Checks of chosen steps in the trainers of other libraries, in one line each.

What is checked, and all options, are those of `zerocheck.attach`.

- `accelerate.py`: accelerate: the steps within `accelerator.accumulate`
- `deepspeed.py`: DeepSpeed: the steps of an engine
- `lightning.py`: Lightning: a callback of its Trainer
- `options.py`: options of `zerocheck.attach`, checked before the training begins
- `torchtitan.py`: torchtitan: the steps of its trainer
- `transformers.py`: transformers: a callback of its Trainer
"""
