"""As scripts do: which rank this is, at the top of the module."""

import os

LOCAL_RANK = os.environ["LOCAL_RANK"]
