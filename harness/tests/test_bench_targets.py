"""What the benchmark makes of its samples: targets, text and plots."""

import dataclasses
from xml.etree import ElementTree

import pytest

from graphreplay_harness import bench_call, bench_dit, bench_peers
from graphreplay_harness.bench_peers import BARE, EAGER, LOOP, OURS, PEERS, SEED, UNCHECKED
from graphreplay_harness.bench_plot import svg
from graphreplay_harness.bench_report import spread
from graphreplay_harness.bench_suite import HEADINGS, Block, SuiteResult, Target


@pytest.fixture
def block():
    """Ours takes 12 µs of the host, unchecked 9, the loop 10, the seed-style wrapper 30, others more; of devices 51 and
    50."""
    host = {LOOP: [10.0], OURS: [11.0, 12.0, 13.0], UNCHECKED: [9.0], SEED: [30.0]}
    host |= {bench_peers.COMPILED: [90.0], EAGER: [200.0]}
    return Block(
        bench_call.TARGET_CASES[0], {"host": host, "device": {LOOP: [50.0], OURS: [51.0]}}, LOOP, {"x<y": "a & b"}
    )


def test_targets_of_calls(block):
    checked, unchecked, peer, device = bench_call.targets(block)
    assert (checked.measured, checked.limit, checked.met) == (1.2, 1.3, True)
    assert (unchecked.measured, unchecked.limit, unchecked.met) == (0.9, 1.0, True)
    assert (peer.measured, peer.limit, peer.met) == (0.3, 0.35, True)
    assert (device.measured, device.limit, device.met) == (1.02, 1.02, True)
    case = "call, 15 tensors, flat, one output"
    assert str(peer).startswith(f"target: {case}: host, check_module=False / fastest peer <= 0.35; ")
    assert str(peer).endswith("measured 0.300, met (that is seed-style wrapper)")
    assert list(bench_call.targets(dataclasses.replace(block, title="1 tensor, flat, one output"))) == []


def test_the_fastest_peer_is_the_one_that_ours_is_compared_with(block):
    block.samples["host"][bench_peers.CALLABLES] = [18.0]
    _, _, peer, _ = bench_call.targets(block)
    assert (peer.measured, peer.met) == (0.5, False)
    assert block.fastest("host", PEERS) == bench_peers.CALLABLES
    assert str(peer).endswith("measured 0.500, missed (that is make_graphed_callables)")


def test_target_of_the_teacher():
    samples = {"whole": {OURS: [101.0], BARE: [100.0]}}
    blocks = [Block(bench_dit.ENCODER, samples, BARE), Block("teacher", samples, BARE)]
    (target,) = bench_dit.targets(blocks)
    assert (target.measured, target.limit, target.met) == (1.01, 1.01, True)


def test_text_has_ratios_then_tables_then_targets(block):
    text = SuiteResult("call", [block], [Target("less", 2, 3.0), Target("more", 2, None, "why")]).text()
    lines = text.splitlines()
    assert lines[1] == (
        "15 tensors, flat, one output: host us in those of hand-written loop: hand-written loop 1.00, ours 1.20, "
        "ours, check_module=False 0.90, seed-style wrapper 3.00, compile, cudagraphs 9.00, eager 20.00"
    )
    (ours,) = (line for line in lines if line.startswith("ours  "))
    assert ours.split() == [
        "ours",
        "1.200",
        "12.00",
        "(11.50",
        "to",
        "12.50)",
        "1.020",
        "51.00",
        "(51.00",
        "to",
        "51.00)",
    ]
    (eager,) = (line for line in lines if line.startswith("eager "))
    assert eager.split()[-1] == "-"
    assert "left out: a & b" in text
    assert lines[-2:] == ["target: less <= 2; measured 3.000, missed", "target: more <= 2; measured nothing (why)"]


def test_the_plot_is_xml_and_holds_every_label(block):
    steps = Block("steps <1>", {"step": {"negative": [-1.0], "nothing": [0.0]}}, None)
    root = ElementTree.fromstring(svg([SuiteResult("call", [block, steps], [])]))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    names = [name for each in (block, steps) for of in each.samples.values() for name in of]
    assert [text for text in texts if text in names] == names
    assert "call: steps <1>" in texts
    assert any(text.startswith(f"{HEADINGS['host']}: ") and "log axis" in text for text in texts)
    assert any(text.startswith(f"{HEADINGS['device']}: ") and "linear axis" in text for text in texts)
    assert str(spread([11.0, 12.0, 13.0])).strip() in texts
    bars = [float(element.get("width")) for element in root.iter(f"{space}rect")][1:]
    assert len(bars) == len(list(root.iter(f"{space}path"))) == len(names)
    assert all(0 <= bar <= 460 for bar in bars)
