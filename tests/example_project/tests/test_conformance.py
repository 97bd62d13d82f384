"""Each step of our sharded training is that of one device."""

from example_sharder.sharding import MyFSDP

import zerocheck


@zerocheck.parametrize_with_checks([MyFSDP], max_cases=5)
def test_conformance(check):
    check()
