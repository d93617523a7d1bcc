"""The classes of errors: what an except clause may rely on."""

import inspect
import pickle

import pytest

import graphreplay
from graphreplay import errors

BUILT_IN = {
    "BackendNotInstalledError": ImportError,
    "BackendUnavailableError": RuntimeError,
    "CaptureError": RuntimeError,
    "ClosedError": RuntimeError,
    "ConfigurationError": ValueError,
    "ForkedError": RuntimeError,
    "HostSyncError": errors.CaptureError,
    "NotCopyableError": TypeError,
    "PositionalArgumentError": TypeError,
    "RankDisagreementError": RuntimeError,
    "StateLostError": RuntimeError,
    "TreeMismatchError": ValueError,
    "UnknownDeviceError": ValueError,
    "UnsupportedLeafError": TypeError,
}
CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__ and not name.startswith("_") and issubclass(cls, errors.GraphReplayError)
}


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"GraphReplayError"}))
def test_every_error_is_one_of_ours_and_one_of_pythons_and_public(name):
    assert issubclass(CLASSES[name], errors.GraphReplayError)
    assert issubclass(CLASSES[name], BUILT_IN[name])
    assert getattr(graphreplay, name) is CLASSES[name]
    assert name in graphreplay.__all__


def test_warnings_are_no_errors():
    assert issubclass(errors.GraphReplayWarning, RuntimeWarning)
    assert not issubclass(errors.GraphReplayWarning, errors.GraphReplayError)


@pytest.mark.parametrize("cls", [errors.UnsupportedLeafError, errors.TreeMismatchError])
def test_errors_about_a_leaf_carry_its_path(cls):
    error = cls('kwargs["x"]', "is a lock")
    assert (error.path, error.problem, str(error)) == ('kwargs["x"]', "is a lock", 'kwargs["x"]: is a lock')


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_errors_cross_process_borders(name):
    leaf = name in ("UnsupportedLeafError", "TreeMismatchError")
    error = CLASSES[name]('kwargs["x"]', "is a lock") if leaf else CLASSES[name]("why")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CLASSES[name]
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
