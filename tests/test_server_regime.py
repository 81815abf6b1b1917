import numpy as np
import pytest

from fedscale.regimes import server

BASE = {"samples": [3, 1, 0, 4], "rounds": 2, "eval_every": 1, "average": "samples"}


def steps(**changes):
    return list(server.steps(**{**BASE, **changes}))


def test_weights_are_the_sample_shares_uniform_or_none():
    share = steps()[0].weights
    np.testing.assert_allclose(share, np.tile([3 / 8, 1 / 8, 0, 4 / 8], (4, 1)))
    np.testing.assert_allclose(steps(average="uniform")[0].weights, 1 / 4)
    np.testing.assert_array_equal(steps(average="none")[0].weights, np.eye(4))


def test_one_shot_with_a_second_pass():
    first, second = steps(rounds=1, statistics=True, restat=True, serve=True)
    assert (first.train, first.statistics, first.serve) == (True, True, False)
    assert (second.train, second.statistics, second.serve) == (False, True, True)
    assert second.phase == "restat" and second.measure


def test_a_late_stream_is_the_tail():
    assert [s.round for s in steps(rounds=5, start_round=4)] == [4, 5]
    assert steps(rounds=5, start_round=6) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"average": "median"}, r"regime\.average=median"),
        ({"samples": [0, 0]}, "one at least is positive"),
        ({"start_round": 9}, "start_round=9"),
    ],
)
def test_bad_input_is_named(changes, text):
    with pytest.raises(ValueError, match=text):
        steps(**changes)
