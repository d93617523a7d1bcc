"""install and uninstall: names of a module bound to this package's, and exactly as before afterwards."""

import sys
from types import ModuleType

import pytest

import graphreplay
import graphreplay_taomate
from graphreplay_taomate import install, uninstall

NAMES = ("GraphedForward", "clone_static", "copy_into", "get_graphed_forward_cls", "kwargs_signature")


class Theirs:
    pass


@pytest.fixture
def client(monkeypatch):
    """A module of TaoMate with three of the five names, and a name that is nobody else's business."""
    module = ModuleType("taomate_client")
    vars(module).update(GraphedForward=Theirs, clone_static=object(), kwargs_signature=object(), capture_context=1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("by_name", [False, True])
def test_names_are_bound_and_restored(client, by_name):
    before = dict(vars(client))
    target = "taomate_client" if by_name else client
    assert install(target) == ("GraphedForward", "clone_static", "kwargs_signature")
    assert client.GraphedForward is graphreplay_taomate.GraphedForward
    assert client.clone_static is graphreplay_taomate.clone_static
    assert client.kwargs_signature is graphreplay_taomate.kwargs_signature
    assert vars(client).keys() == before.keys()  # names that it lacks are not added
    assert client.capture_context == 1
    assert uninstall(target) == ("GraphedForward", "clone_static", "kwargs_signature")
    assert vars(client).keys() == before.keys()
    assert all(vars(client)[name] is value for name, value in before.items())


def test_twice_is_as_once(client):
    install(client)
    assert install(client) == ("GraphedForward", "clone_static", "kwargs_signature")
    client.GraphedForward = object()
    client.copy_into = original = object()
    assert install(client) == ("GraphedForward", "clone_static", "copy_into", "kwargs_signature")
    assert client.GraphedForward is graphreplay_taomate.GraphedForward
    assert client.copy_into is graphreplay_taomate.copy_into
    uninstall(client)
    assert client.GraphedForward is Theirs
    assert client.copy_into is original
    assert uninstall(client) == ()
    assert client.GraphedForward is Theirs


def test_uninstall_without_install_does_nothing(client):
    before = dict(vars(client))
    assert uninstall(client) == ()
    assert uninstall("taomate_client") == ()
    assert uninstall("no_such_module") == ()
    assert vars(client) == before


def test_two_modules_are_apart(client):
    other = ModuleType("other")
    other.copy_into = mine = object()
    install(client)
    install(other)
    uninstall(client)
    assert client.GraphedForward is Theirs
    assert other.copy_into is graphreplay_taomate.copy_into
    uninstall(other)
    assert other.copy_into is mine


def test_a_platform_object_whose_hook_is_a_method():
    class Platform:
        @classmethod
        def get_graphed_forward_cls(cls):
            return Theirs

    platform = Platform()
    assert install(platform) == ("get_graphed_forward_cls",)
    assert platform.get_graphed_forward_cls() is graphreplay_taomate.GraphedForward
    assert Platform.get_graphed_forward_cls() is Theirs
    uninstall(platform)
    assert vars(platform) == {}
    assert platform.get_graphed_forward_cls() is Theirs


def test_a_target_with_none_of_the_names():
    with pytest.raises(graphreplay.ConfigurationError, match=f"has none of the names {', '.join(NAMES)}"):
        install(ModuleType("unrelated"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        install("no_such_module")
