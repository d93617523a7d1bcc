"""The reference backend itself: a replay runs recorded operators on fixed storages, and real models equal eager."""

import copy
import warnings

import pytest
import torch
from torch import nn

from graphreplay import ReferenceGraphedForward
from graphreplay.reference import RecordedGraph, _Recorder
from graphreplay.testing import zoo
from graphreplay.testing.contract_twin import MODES, Twin, assert_same


def record(forward):
    graph = RecordedGraph()
    with torch.no_grad(), _Recorder(graph):
        return graph, forward()


def test_replay_runs_no_python_of_the_module():
    runs = []

    def forward(*, x):
        runs.append(1)
        return x + 1

    graphed = ReferenceGraphedForward(forward, device="cpu", warmup_iters=3)
    graphed(x=torch.ones(2))
    assert len(runs) == 5  # the call's own, three warm-ups, the capture
    for value in range(3):
        assert graphed(x=torch.full((2,), float(value))).tolist() == [value + 1] * 2
    assert len(runs) == 5


def test_addresses_are_fixed_and_outputs_overwritten():
    static = zoo.rows(3)
    graph, result = record(lambda: (static * 2, static.sum(0)))
    addresses = [tensor.data_ptr() for tensor in result]
    for seed in range(3):
        static.copy_(zoo.rows(3, seed))
        graph.replay()
        assert [tensor.data_ptr() for tensor in result] == addresses
        assert_same(result, (zoo.rows(3, seed) * 2, zoo.rows(3, seed).sum(0)))


def test_views_in_place_hold_across_replays():
    static = zoo.rows(3)

    def forward():
        y = static * 2
        y.t_()
        y.unsqueeze_(0)
        y.squeeze_(0)
        y[0].add_(1)
        return y, y.t()

    graph, result = record(forward)
    expected = copy.deepcopy(result)
    for _ in range(3):
        graph.replay()
        assert_same(result, expected)


def test_constants_start_afresh_at_each_replay():
    graph, result = record(lambda: torch.tensor([1.0, 2.0]).add_(torch.ones(2)).mul_(3))
    for _ in range(3):
        result.zero_()
        graph.replay()
        assert result.tolist() == [6.0, 9.0]


def test_random_operators_draw_again():
    graph, result = record(lambda: (torch.rand(4), torch.zeros(4).normal_(), torch.randperm(50)))
    with torch.random.fork_rng(devices=[], device_type="cuda"):
        drawn = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            graph.replay()
            drawn.append(copy.deepcopy(result))
        torch.manual_seed(1)
        assert_same(drawn[0], (torch.rand(4), torch.zeros(4).normal_(), torch.randperm(50)))
    assert_same(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_autocast_acts_once_at_capture():
    static = zoo.rows(3)

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return static @ static.t()

    graph, result = record(forward)
    assert result.dtype == torch.bfloat16
    static.copy_(zoo.rows(3, 5))
    for autocast in (False, True):
        result.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            graph.replay()
        assert_same(result, forward())


def test_bytes_count_every_storage_once():
    graph, _ = record(lambda: (y := torch.zeros(100), y[10:], y.view(10, 10) + 1))
    assert graph.nbytes == 800


def test_reset_drops_the_recording():
    graph, result = record(lambda: torch.ones(2) * 2)
    graph.reset()
    graph.reset()
    result.zero_()
    graph.replay()
    assert result.tolist() == [0.0, 0.0]


# --------------------------------------------------------------------------------------- real models

IDS = {"input_ids": lambda n: torch.arange(2 * n).view(2, n) % 30}


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return transformers.BertModel(config), {**IDS, "token_type_ids": lambda n: torch.arange(2 * n).view(2, n) % 2}


def t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5EncoderModel(config), IDS


def dit():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.StableAudioDiTModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        cross_attention_dim=16,
        cross_attention_input_dim=16,
        global_states_input_dim=16,
        time_proj_dim=16,
    )
    return model, {
        "hidden_states": lambda n: torch.randn(1, 4, n),
        "timestep": lambda n: torch.rand(1),
        "encoder_hidden_states": lambda n: torch.randn(1, 5, 16),
        "global_hidden_states": lambda n: torch.randn(1, 1, 16),
        "rotary_embedding": lambda n: (torch.randn(n + 1, 4), torch.randn(n + 1, 4)),
    }


def lstm():
    return nn.LSTM(8, 8, 2, bidirectional=True), {"input": lambda n: torch.randn(n, 2, 8)}


def attention():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    return model, {name: lambda n: torch.randn(2, n, 8) for name in ("query", "key", "value")}


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), {"src": lambda n: torch.randn(2, n, 8)}


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still in use
        return torch.jit.script(zoo.Keyword(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))), {"x": zoo.rows}


MODELS = (bert, t5, dit, lstm, attention, encoder_layer, scripted)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # diffusers imports what it deprecates itself
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", MODELS)
def test_real_models_equal_eager_bit_for_bit(build, mode):
    with torch.random.fork_rng(devices=[], device_type="cuda"):
        torch.manual_seed(0)
        model, inputs = build()
        model.eval()
        twin = Twin(ReferenceGraphedForward(model, device="cpu"), copy.deepcopy(model), "cpu")
        with MODES[mode]():
            for length in (6, 9, 6, 9, 6):
                twin(**{name: make(length) for name, make in inputs.items()})
    assert twin.counts() == (2, 3, 0), twin.graphed.stats()


@pytest.mark.parametrize("build", [bert, lstm, encoder_layer])
def test_real_models_in_training_mode_equal_eager(build):
    with torch.random.fork_rng(devices=[], device_type="cuda"):
        torch.manual_seed(0)
        model, inputs = build()
        model.train()
        twin = Twin(ReferenceGraphedForward(model, device="cpu"), copy.deepcopy(model), "cpu")
        with torch.no_grad():
            for _ in range(4):
                twin(**{name: make(6) for name, make in inputs.items()})
    assert twin.counts() == (1, 3, 0), twin.graphed.stats()


def test_a_graph_that_cannot_be_freed_costs_no_result(monkeypatch, caplog):
    graphed = ReferenceGraphedForward(lambda *, x: x + 1, device="cpu", max_entries=1)

    def fail(self):
        if "failed" not in vars(self):  # once: whoever drops the graph tries again
            self.failed = True
            raise RuntimeError("planned")

    with torch.no_grad():
        graphed(x=torch.ones(1))
        monkeypatch.setattr(RecordedGraph, "reset", fail)
        for count in (2, 2, 3):
            assert graphed(x=torch.ones(count)).tolist() == [2.0] * count
        graphed.close()
        monkeypatch.undo()
    assert (graphed.captures, graphed.num_graphs) == (3, 0)
    told = [message for message in caplog.messages if "thrashes" not in message]
    assert told == ["a graph could not be freed: RuntimeError: planned"] * 3


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("autocast", [True, False])
def test_composite_operators_under_autocast_are_as_eager(autocast, mode):
    """Under inference mode they come in parts, which autocast does not reach there; so those are not recorded."""
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    graphed = ReferenceGraphedForward(lambda *, x: torch.einsum("ij,kj->ik", x, weight), device="cpu")
    with mode(), torch.autocast("cpu", enabled=autocast):
        for seed in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
            got, wanted = graphed(x=x), torch.einsum("ij,kj->ik", x, weight)
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)
    refused = autocast and mode is torch.inference_mode
    assert graphed.stats()["replays"] == (0 if refused else 2)
    assert ("use torch.no_grad()" in (graphed.disabled_reason or "")) is refused
