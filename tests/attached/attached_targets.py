"""What the rank processes of these tests do: train, with `attach` in the script."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

import axis_scenarios
import comparison_scenarios
import exchange_scenarios
import failing_scenarios
import gathered_scenarios
import load_scenarios
import output_scenarios
import scenarios
import script_change_scenarios
import stage_scenarios
import token_scenarios
import torch
import train_attached

from zerocheck.errors import ZerocheckError
from zerocheck.ranks.context import RankContext


def run(payload: bytes, context: RankContext) -> bytes:
    """{"call": name, ...} -> what came of it."""
    given = json.loads(payload)
    call = given.pop("call")
    torch.use_deterministic_algorithms(False)
    answer: dict[str, Any] = {}
    try:
        if call == "train":
            answer["taken"] = train_attached.train(**given)
        else:
            rooms = (scenarios, output_scenarios, failing_scenarios, load_scenarios)
            rooms = (*rooms, token_scenarios, comparison_scenarios, exchange_scenarios)
            rooms = (*rooms, script_change_scenarios, axis_scenarios, stage_scenarios)
            rooms = (*rooms, gathered_scenarios)
            answer = next(getattr(room, call) for room in rooms if hasattr(room, call))(**given)
    except ZerocheckError as error:
        answer = {"raised": type(error).__name__, "said": str(error)}
    return json.dumps(answer).encode()
