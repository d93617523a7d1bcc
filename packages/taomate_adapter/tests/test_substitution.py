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


def test_a_class_as_target():
    class Platform:
        @classmethod
        def get_graphed_forward_cls(cls):
            return Theirs

    class OfAVendor(Platform):
        pass

    for target in (Platform, OfAVendor):
        assert install(target) == install(target) == ("get_graphed_forward_cls",)
        for asked in (target, target()):
            assert asked.get_graphed_forward_cls() is graphreplay_taomate.GraphedForward
        assert uninstall(target) == ("get_graphed_forward_cls",)
        assert OfAVendor().get_graphed_forward_cls() is Platform.get_graphed_forward_cls() is Theirs
    assert "get_graphed_forward_cls" not in vars(OfAVendor)


def test_a_module_that_has_left_is_uninstalled_by_its_name(client, monkeypatch):
    install("taomate_client")
    monkeypatch.delitem(sys.modules, "taomate_client")
    fresh = ModuleType("taomate_client")
    fresh.GraphedForward = Theirs
    monkeypatch.setitem(sys.modules, "taomate_client", fresh)
    assert uninstall("taomate_client") == ("GraphedForward", "clone_static", "kwargs_signature")
    assert client.GraphedForward is fresh.GraphedForward is Theirs
    install(fresh)
    monkeypatch.delitem(sys.modules, "taomate_client")
    assert uninstall("taomate_client") == ("GraphedForward",)
    assert fresh.GraphedForward is Theirs


def test_what_others_did_since_then_stays(client):
    original = client.kwargs_signature
    install(client)
    client.GraphedForward = patched = object()
    del client.clone_static
    assert uninstall(client) == ("kwargs_signature",)
    assert client.GraphedForward is patched
    assert not hasattr(client, "clone_static")
    assert client.kwargs_signature is original


def test_an_inherited_name_that_was_deleted_since_then():
    class Platform:
        def get_graphed_forward_cls(self):
            return Theirs

    platform = Platform()
    install(platform)
    del platform.get_graphed_forward_cls
    assert uninstall(platform) == ()
    assert platform.get_graphed_forward_cls() is Theirs


class ReadOnly:
    copy_into = property(lambda self: 1)

    def __init__(self):
        self.GraphedForward = Theirs


class Slots:
    __slots__ = ("GraphedForward",)

    def __init__(self):
        self.GraphedForward = Theirs


class SlotsAndMore(Slots):
    clone_static = 1


class Settable(ReadOnly):
    copy_into = property(lambda self: self.kept, lambda self, value: setattr(self, "kept", value))

    def __init__(self):
        super().__init__()
        self.kept = 1


@pytest.mark.parametrize("cls", [ReadOnly, Slots, SlotsAndMore, Settable])
def test_a_target_that_cannot_be_bound_is_left_as_it_was(cls):
    target = cls()
    before = dict(getattr(target, "__dict__", {}))
    with pytest.raises(graphreplay.ConfigurationError, match="cannot be bound: "):
        install(target)
    assert target.GraphedForward is Theirs
    assert getattr(target, "__dict__", {}) == before
    assert uninstall(target) == ()


def test_a_second_install_that_fails_leaves_the_first():
    class Later:
        def __init__(self):
            self.GraphedForward = Theirs

    target = Later()
    install(target)
    Later.copy_into = property(lambda self: 1)
    with pytest.raises(graphreplay.ConfigurationError):
        install(target)
    assert target.GraphedForward is graphreplay_taomate.GraphedForward
    assert uninstall(target) == ("GraphedForward",)
    assert target.GraphedForward is Theirs


@pytest.mark.parametrize("name", ["graphreplay", "graphreplay.registry", "graphreplay.forward"])
def test_graphreplay_itself_is_no_target(name):
    before = graphreplay.get_graphed_forward_cls
    with pytest.raises(graphreplay.ConfigurationError, match="is what this package builds on"):
        install(name)
    with pytest.raises(graphreplay.ConfigurationError, match="is what this package builds on"):
        install(sys.modules[name])
    assert graphreplay.get_graphed_forward_cls is before


def test_a_target_with_none_of_the_names():
    with pytest.raises(graphreplay.ConfigurationError, match=f"has none of the names {', '.join(NAMES)}"):
        install(ModuleType("unrelated"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        install("no_such_module")
