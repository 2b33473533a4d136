"""Errors say what they are about, and go from one process to another."""

import concurrent.futures
import copy
import multiprocessing
import pickle

import pytest

import holdfast

ERRORS = [
    holdfast.LockLost("a", b"me", 7, "forced"),
    holdfast.LockLost(("a", b"b"), b"me", None, "expired"),
    holdfast.NotHeld("it is not held", "a"),
    holdfast.NotGranted("not in time", "a"),
    holdfast.Deadlock("a cycle", "a"),
    holdfast.WrongType("no lock"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [*range(pickle.HIGHEST_PROTOCOL + 1), "copy"])
def test_an_error_survives_pickling(error, again):
    other = copy.copy(error) if again == "copy" else pickle.loads(pickle.dumps(error, again))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_an_error_is_told_in_words():
    assert str(ERRORS[0]) == "lock 'a' of owner b'me' is lost: forced"
    assert str(ERRORS[3]) == "not in time"
    assert [error.lock_name for error in ERRORS] == ["a", ("a", b"b"), "a", "a", "a", None]


def lose():
    raise holdfast.LockLost("a", b"me", 7, "forced")


def test_a_loss_crosses_a_process_pool():
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        with pytest.raises(holdfast.LockLost) as caught:
            pool.submit(lose).result(50)
        assert (caught.value.reason, caught.value.fence, caught.value.owner) == ("forced", 7, b"me")
        # It did not break the pool.
        assert pool.submit(int).result(50) == 0
