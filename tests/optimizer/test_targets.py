"""Cells sized by the pace of the engine."""

from optimizer import targets


def test_a_fast_engine_is_timed_with_more_requests_a_slow_one_with_those_of_the_protocol():
    quick = targets.PROTOCOLS["quick"]
    slow, fast, faster = (targets.sized(quick, us).cell.requests for us in (66_000.0, 8_000.0, 10.0))
    assert slow == quick.cell.requests
    assert fast * quick.cell.new_tokens * 8_000 >= targets.BLOCK_S * 1e6
    assert faster == targets.BLOCK_MOST * quick.cell.requests
    assert targets.sized(quick, None) is quick
