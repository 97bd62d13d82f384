"""Differences of earlier releases of DeepSpeed from 0.19.8, after which the adapter was written.

Each was read in the release and measured: reports/releases.
"""

from __future__ import annotations

from importlib.metadata import version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

INSTALLED = Version(version("deepspeed"))
CONFIGS_READ = Version("0.19.8")
"""Configs of users are read as this release and later ones read them."""


def _is(releases: str) -> bool:
    return SpecifierSet(releases).contains(INSTALLED, prereleases=True)


other_precision = _is("<0.18.3")
"""Masters and gradients of reduced precision are elsewhere than where the adapter reads them."""
divides_outputs = _is(">=0.18.3,<0.19.8")
"""`backward` divides the gradients of what the model returned by the number of microbatches, and
not the loss. (0.19.5 still does, 0.19.8 does not.)"""
flat_needs_grad = _is(">=0.18.7,<0.19.0")
"""The flat parameters of stages 1 and 2 require a gradient, and `step` gathers into them outside of
`torch.no_grad()`, which gloo refuses. (Pull requests 7828 and 7948 of deepspeedai/DeepSpeed.)"""
converts_one_group = _is("<0.18")
"""`ds_to_universal` reads the first group of stage 3 alone, and elements that a rank has not."""
sums_anew = _is(">=0.17.6,<0.18.3")
"""Stage 2 sums no microbatches (reports/findings/deepspeed2-last-microbatch-only.md), and stages 1
and 2 fail where a rank has no gradient of a group. (Both of pull request 7509.)"""
last_not_reduced = _is(">=0.18.3,<0.19")
"""reports/findings/deepspeed1-last-microbatch-not-reduced.md"""
waits_for_the_last = _is("<0.19.8")
"""`_allgather_params_coalesced` waits for the last gather of persistent parameters alone; gloo ends
them in any order."""
