"""The single-device trainer, with AdamW, SGD or Muon, that sharded training is checked against.

Written from the equations. It imports torch, and neither torch.optim nor anything of zerocheck.
Every refusal of an argument is a ValueError.
"""

from .adamw import AdamWOptions, AdamWState, adamw_step, bias_correction, initial_state
from .clip import CLIP_RULES, ClipRule, clip_coefficient, gradient_norm
from .gradient import LocalPass, average, local_pass
from .muon import Adjustment, MuonOptions, MuonState, adjusted, muon_step, orthogonalized
from .optimizer import OptimizerOptions, OptimizerState
from .precision import half_ulp, round_to, smallest_subnormal, unit_roundoff
from .schedule import constant, cosine, linear_warmup
from .sgd import SGDOptions, SGDState, sgd_step
from .trainer import Group, StepResult, Trainer

__all__ = [
    "CLIP_RULES",
    "AdamWOptions",
    "AdamWState",
    "Adjustment",
    "ClipRule",
    "Group",
    "LocalPass",
    "MuonOptions",
    "MuonState",
    "OptimizerOptions",
    "OptimizerState",
    "SGDOptions",
    "SGDState",
    "StepResult",
    "Trainer",
    "adamw_step",
    "adjusted",
    "average",
    "bias_correction",
    "clip_coefficient",
    "constant",
    "cosine",
    "gradient_norm",
    "half_ulp",
    "initial_state",
    "linear_warmup",
    "local_pass",
    "muon_step",
    "orthogonalized",
    "round_to",
    "sgd_step",
    "smallest_subnormal",
    "unit_roundoff",
]
