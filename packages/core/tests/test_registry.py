"""Which class answers for which device."""

import pytest
import torch

from graphreplay import (
    BackendNotInstalledError,
    BackendUnavailableError,
    GraphedForward,
    ReferenceGraphedForward,
    UnknownDeviceError,
    get_graphed_forward_cls,
    registry,
)

CPU_ENTRY = "graphreplay:ReferenceGraphedForward"


class ThirdParty(GraphedForward):
    """A backend of another project, for a device type of its own."""

    asked: torch.device | None = None

    @classmethod
    def resolve_device(cls, device):
        cls.asked = device
        return device


class Absent(GraphedForward):
    @classmethod
    def resolve_device(cls, device):
        raise BackendUnavailableError(f"no driver for {device}")


@pytest.fixture
def install(monkeypatch):
    """Makes these entry points, by device type, all that are installed."""

    def make(**targets):
        entries = [
            registry.EntryPoint(name, target, registry.GROUP) if isinstance(target, str) else _Loaded(name, target)
            for name, target in targets.items()
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "graphreplay.backends" else [])

    return make


class _Loaded:
    def __init__(self, name, target):
        self.name, self.target = name, target

    def load(self):
        return self.target


@pytest.fixture
def accelerator(monkeypatch):
    """Makes this device type the accelerator of the machine; None for no accelerator."""

    def make(kind):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)

    return make


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_cpu_is_answered_by_the_reference_class(device):
    assert get_graphed_forward_cls(device) is ReferenceGraphedForward


@pytest.mark.parametrize("device", ["nonsense", "cuda:x", "", 1.5])
def test_what_torch_does_not_know_is_unknown(device):
    with pytest.raises(UnknownDeviceError, match="is no device"):
        get_graphed_forward_cls(device)


def test_a_type_without_any_backend_is_unknown():
    with pytest.raises(UnknownDeviceError, match=r"no graphreplay backend for device type 'mps'.* cpu, cuda, xpu"):
        get_graphed_forward_cls("mps")


@pytest.mark.parametrize(
    ("device", "package"), [("xpu", "graphreplay-xpu"), ("cuda:1", "graphreplay-cuda"), ("cpu", "graphreplay-core")]
)
def test_a_known_type_names_the_package_to_install(install, device, package):
    install(hpu=ThirdParty)
    folder = package.removeprefix("graphreplay-")
    said = rf"device {device} needs {package}, .* from where graphreplay-core came .*install \./packages/{folder}\)$"
    with pytest.raises(BackendNotInstalledError, match=said):
        get_graphed_forward_cls(device)


def test_a_package_installed_later_is_found(install):
    install(cpu=CPU_ENTRY)
    with pytest.raises(BackendNotInstalledError):
        get_graphed_forward_cls("xpu")
    install(cpu=CPU_ENTRY, xpu=ThirdParty)
    assert get_graphed_forward_cls("xpu:1") is ThirdParty
    assert ThirdParty.asked == torch.device("xpu", 1)


def test_a_third_party_serves_a_type_of_its_own(install):
    install(cpu=CPU_ENTRY, hpu=ThirdParty)
    assert get_graphed_forward_cls("hpu") is ThirdParty
    assert get_graphed_forward_cls("cpu") is ReferenceGraphedForward


def test_a_backend_that_cannot_run_here_says_why(install):
    install(xpu=Absent)
    with pytest.raises(BackendUnavailableError, match="no driver for xpu:3"):
        get_graphed_forward_cls("xpu:3")


def test_a_backend_that_cannot_be_imported_says_why(install):
    install(xpu="graphreplay_that_is_not_there:Backend")
    with pytest.raises(BackendUnavailableError, match=r"cannot be imported: .*graphreplay_that_is_not_there"):
        get_graphed_forward_cls("xpu")


def test_without_an_accelerator_the_base_class_answers_and_captures_nothing(accelerator):
    accelerator(None)
    cls = get_graphed_forward_cls()
    assert cls is GraphedForward
    graphed = cls(lambda x: x + 1, device="cpu")
    assert not graphed.enabled
    assert graphed(x=torch.ones(1)).tolist() == [2.0]
    assert graphed.captures == 0


def test_none_picks_the_accelerator(accelerator, install):
    accelerator("xpu")
    install(cpu=CPU_ENTRY, xpu=ThirdParty)
    assert get_graphed_forward_cls() is ThirdParty


def test_none_never_hides_a_package_that_is_missing(accelerator, install):
    accelerator("xpu")
    install(cpu=CPU_ENTRY)
    with pytest.raises(BackendNotInstalledError, match="device xpu needs graphreplay-xpu, "):
        get_graphed_forward_cls(None)


def test_none_answers_the_base_class_for_an_accelerator_without_backend(accelerator):
    accelerator("mps")
    assert get_graphed_forward_cls() is GraphedForward


def test_none_finds_a_third_party_accelerator(accelerator, install):
    accelerator("hpu")
    install(hpu=ThirdParty)
    assert get_graphed_forward_cls() is ThirdParty
