"""Hugging Face accelerate, as a user's own config (`accelerate config`) sets it up.

- `checkpoint.py`: checkpoints of `Accelerator.save_state`, numbered in one directory
- `implementation.py`: implementation made from the user's config: what accelerate makes of it
- `launch.py`: accelerate in a rank process: environment of `accelerate launch`, state put back
- `refusals.py`: cases that what accelerate makes cannot run, known from the case alone
- `user_config/`: accelerate config of the user's own, read without torch and accelerate
"""
