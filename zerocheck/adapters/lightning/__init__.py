"""Lightning, as a user's own config of LightningCLI or a strategy object sets it up.

- `given_strategy.py`: implementation made from a strategy object of the user's own
- `implementation.py`: implementation made from a config: what the Trainer makes of it, in its loop
- `refusals.py`: cases that what Lightning makes cannot run, known from the case alone
- `strategies.py`: strategies of a config as Lightning takes them: names, or objects with arguments
- `trainer.py`: Lightning's Trainer in a rank process, with the model of a case
- `user_config/`: config of LightningCLI of the user's own, read without torch and Lightning
"""
