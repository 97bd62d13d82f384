"""transformers' Trainer, as a user's own TrainingArguments set it up.

- `implementation.py`: implementation made from TrainingArguments: what a Trainer makes of them
- `user_config/`: TrainingArguments of the user's own, read without torch and transformers
"""
