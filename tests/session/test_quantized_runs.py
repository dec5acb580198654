"""One publisher of a run and its quantized runs: from one baseline, bit for bit what separate publishers give."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest
import torch

from sparserl import Publisher, Subscriber, sources
from sparserl.errors import SessionError, Unavailable
from sparserl.metrics import Callback
from sparserl.session.store.stored_run import StoredRun
from sparserl.transport.stores.folder import FolderStore
from sparserl.weights import batches

SCHEMES = ("fp8_blockwise", "fp8_per_channel", "fp8_per_tensor", "int8", "mxfp4", "mxfp8", "nvfp4")


def model(seed=0):
    """Weights of two layers that engines fuse, one that is frozen, and some that are not quantized."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).mul_(0.1).to(torch.bfloat16)

    return {
        "embed.weight": normal(40, 64),
        "layers.0.q_proj.weight": normal(130, 64),
        "layers.0.k_proj.weight": normal(66, 64),
        "layers.0.o_proj.weight": normal(64, 192),
        "layers.0.norm.weight": normal(64),
    }


FROZEN = "layers.0.o_proj.weight"


def step(weights, number):
    """Change some elements, by little and by much, also the largest of a block."""
    generator = torch.Generator().manual_seed(1000 + number)
    for name, tensor in weights.items():
        if name == FROZEN:
            continue
        flat = tensor.view(-1)
        where = torch.randint(0, flat.numel(), (max(2, flat.numel() // 100),), generator=generator)
        flat[where] *= 1.5
        flat[where[:1]] = 3.0 + number


def quantized_now(weights, scheme):
    """The bits that a quantized rollout must have."""
    return {name: tensor.clone() for name, tensor in sources.quantized(weights, scheme).weights().items()}


def empty_like(weights):
    return {name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in weights.items()}


def equal(a, b):
    bits = [(x.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)) for name, x in a.items()]
    return a.keys() == b.keys() and all(torch.equal(x, y) for x, y in bits)


def steps_of(folder):
    """The buckets of every patch in a store, by what they contain."""
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file() and "buckets" in path.parts)


class Away(FolderStore):
    """A store that can go away."""

    away = False

    def put(self, name, data):
        if type(self).away:
            raise Unavailable("away")
        super().put(name, data)


@pytest.fixture
def away(monkeypatch):
    """Stores of which those in a folder called `away` can go away."""
    from sparserl.session.store import quantized_runs

    def opened(url):
        return Away(url.removeprefix("file://")) if url.endswith("away") else quantized_runs_open(url)

    quantized_runs_open = quantized_runs.open_writable
    monkeypatch.setattr(quantized_runs, "open_writable", opened)
    monkeypatch.setattr(Away, "away", False)
    return Away


@pytest.mark.parametrize(
    ("scheme", "wait"),
    [
        ("fp8_blockwise", True),
        ("nvfp4", False),
        *(pytest.param(scheme, True, marks=pytest.mark.long) for scheme in SCHEMES[1:]),
    ],
)
def test_both_runs_are_those_of_separate_publishers(tmp_path, scheme, wait):
    """Receivers get the same bits, and the objects with changes are the same, byte for byte."""
    weights = model()
    url = f"file://{tmp_path}/pair-quantized"
    pair = Publisher(f"file://{tmp_path}/pair", weights, also={url: scheme}, ladder=(2, 4))
    alone = Publisher(f"file://{tmp_path}/alone", weights, ladder=(2, 4))
    alone_quantized = Publisher(f"file://{tmp_path}/alone-quantized", sources.quantized(weights, scheme), ladder=(2, 4))
    live = empty_like(weights)
    live_quantized = empty_like(quantized_now(weights, scheme))
    subscribers = [Subscriber(pair.store.url, live), Subscriber(url, live_quantized)]
    for version in range(4):
        step(weights, version)
        alone.publish()
        alone_report = alone_quantized.publish()
        expected = {name: tensor.clone() for name, tensor in weights.items()}
        report = pair.publish() if wait else pair.publish_in_background()
        if not wait:
            step(weights, 100)  # belongs to no version that is looked at: it is taken back
            report = report.result()
            for name, tensor in weights.items():
                tensor.copy_(expected[name])
        assert report.version == version
        quantized_report = report.also[url]
        assert quantized_report.version == version
        assert quantized_report.digest == alone_report.digest
        assert (quantized_report.changed, quantized_report.kind) == (alone_report.changed, alone_report.kind)
        for subscriber in subscribers:
            subscriber.sync()
        assert equal(live, weights)
        assert equal(live_quantized, quantized_now(weights, scheme))
    assert pair.wait(3, 1, timeout=0, url=url) == 1
    for publisher in (pair, alone, alone_quantized):
        publisher.close()
    assert steps_of(tmp_path / "pair") == steps_of(tmp_path / "alone")
    assert steps_of(tmp_path / "pair-quantized") == steps_of(tmp_path / "alone-quantized")
    assert len(steps_of(tmp_path / "pair-quantized")) > 4


class Told(Callback):
    """What a publisher tells."""

    def __init__(self):
        self.versions = []
        self.errors = []

    def published(self, report):
        self.versions.append((report.version, sorted(one.version for one in report.also.values())))

    def failed(self, stage, error):
        self.errors.append((stage, type(error)))


class Scene:
    """A publisher of a run and an fp8 run of it, with a subscriber of each."""

    def __init__(self, tmp_path, **options):
        self.weights = model()
        self.told = Told()
        self.place = f"{tmp_path}/bf16"
        self.url = f"file://{tmp_path}/away"
        self.options = options
        self.publisher = self.open()
        self.live = empty_like(self.weights)
        self.live_quantized = empty_like(quantized_now(self.weights, "fp8_blockwise"))
        self.subscriber = Subscriber(f"file://{self.place}", self.live)
        self.quantized_subscriber = Subscriber(self.url, self.live_quantized)

    def open(self):
        options = {"also": {self.url: "fp8_blockwise"}, "callbacks": [self.told], "ladder": None, **self.options}
        return Publisher(options.pop("store", None) or f"file://{self.place}", self.weights, **options)

    @property
    def quantized(self):
        return self.publisher._also.by_url[self.url]

    @property
    def in_step(self):
        """Whether the quantized run has no bits of its own."""
        baseline = self.quantized._committed.baseline
        return baseline.view is not None and baseline._own is None

    def check(self):
        """Both rollouts get the weights as they are now."""
        self.subscriber.sync()
        self.quantized_subscriber.sync()
        assert equal(self.live, self.weights)
        assert equal(self.live_quantized, quantized_now(self.weights, "fp8_blockwise"))


def test_a_quantized_run_that_fails_leaves_the_other_right(tmp_path, away):
    """The error is raised and told; the run itself is published; the next publish makes up for both."""
    scene = Scene(tmp_path)
    scene.publisher.publish()
    assert scene.in_step
    runs = scene.publisher.run, scene.quantized.run
    for number in range(2):
        away.away = True
        step(scene.weights, number)
        with pytest.raises(Unavailable, match="away"):
            scene.publisher.publish()
        assert (scene.publisher.version, scene.quantized.version) == (number + 1, 0)
    scene.subscriber.sync()
    assert equal(scene.live, scene.weights)
    assert scene.told.versions == [(0, [0]), (1, []), (2, [])]
    assert scene.told.errors == [("publish", Unavailable)] * 2
    away.away = False
    step(scene.weights, 2)
    report = scene.publisher.publish()
    assert (report.version, report.also[scene.url].version, report.also[scene.url].kind) == (3, 1, "patch")
    scene.check()
    assert scene.in_step
    step(scene.weights, 3)
    scene.publisher.publish()
    scene.check()
    assert (scene.publisher.run, scene.quantized.run) == runs
    scene.publisher.close()


def test_a_leading_run_that_fails_leaves_the_other_right(tmp_path, away):
    """The quantized run is published nevertheless, keeps its own bits until both are in step, and then lets them go."""
    store = type("Leading", (Away,), {})(tmp_path / "bf16")
    scene = Scene(tmp_path, store=store)
    scene.publisher.publish()
    for number in range(3):
        type(store).away = True
        step(scene.weights, number)
        with pytest.raises(Unavailable, match="away"):
            scene.publisher.publish()
        assert (scene.publisher.version, scene.quantized.version) == (0, number + 1)
        scene.quantized_subscriber.sync()
        assert equal(scene.live_quantized, quantized_now(scene.weights, "fp8_blockwise"))
    assert not scene.in_step
    type(store).away = False
    for number in range(3, 5):
        step(scene.weights, number)
        scene.publisher.publish()
        scene.check()
        assert scene.in_step
    scene.publisher.close()


def test_both_fail_and_both_are_told(tmp_path, away):
    """The error of the run itself is raised, and callbacks are told of the other, too."""
    store = Away(tmp_path / "bf16")
    scene = Scene(tmp_path, store=store)
    scene.publisher.publish()
    away.away = True
    step(scene.weights, 0)
    background = scene.publisher.publish_in_background()
    with pytest.raises(Unavailable, match="away"):
        background.result()
    assert scene.told.errors == [("publish", Unavailable)] * 2
    away.away = False
    assert scene.publisher.publish().also[scene.url].version == 1
    scene.check()
    scene.publisher.close()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_a_restart_continues_both(tmp_path, away, state, failed):
    """From the bits of the leading run, if these are of the same weights; else from what was saved or the store has."""
    scene = Scene(tmp_path, state=tmp_path / "state" if state else None)
    scene.publisher.publish()
    step(scene.weights, 0)
    scene.publisher.publish()
    if failed:
        away.away = True
        step(scene.weights, 1)
        with pytest.raises(Unavailable):
            scene.publisher.publish()
        away.away = False
    runs = scene.publisher.run, scene.quantized.run
    scene.publisher.close()
    scene.publisher = scene.open()
    assert (scene.publisher.run, scene.quantized.run) == runs
    assert scene.in_step == (not failed)
    for number in range(2, 4):
        step(scene.weights, number)
        report = scene.publisher.publish()
        assert [report.kind, report.also[scene.url].kind] == ["patch", "patch"]
        scene.check()
        assert scene.in_step
    scene.publisher.close()
    with pytest.raises(SessionError, match="closed"):
        scene.publisher.publish()


def held_bytes():
    """Bytes of torch tensors and of all that tracemalloc knows."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.resizable():  # others are memory of NumPy's, which tracemalloc knows
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) + tracemalloc.get_traced_memory()[0]


def held_by_publisher(folder, weights):
    """Bytes that a publisher holds after some publishes."""
    url = f"file://{folder}/fp8"
    before = held_bytes()
    options = {"also": {url: "fp8_blockwise"}, "ladder": None, "threads": 1}  # each thread keeps some buffers
    with Publisher(f"file://{folder}/bf16", weights, **options) as publisher:
        for number in range(3):
            step(weights, number)
            assert publisher.publish().also[url].version == number
        return held_bytes() - before


@pytest.mark.long
def test_memory_is_that_of_one_baseline(tmp_path, monkeypatch):
    """After publishes, there is one copy of the weights and hardly anything beside it, for both runs."""
    monkeypatch.setattr(batches, "PIECE_BYTES", 1 << 16)  # staging buffers are kept, whatever the size of a model
    weights = {f"layers.{i}.proj.weight": torch.randn(512, 1024).to(torch.bfloat16) for i in range(4)}
    size = sum(tensor.nbytes for tensor in weights.values())
    held_by_publisher(tmp_path / "first", {name: tensor.clone() for name, tensor in weights.items()})  # loads kernels
    tracemalloc.start()
    try:
        assert size <= held_by_publisher(tmp_path / "second", weights) < 1.15 * size
    finally:
        tracemalloc.stop()


def test_tensors_that_did_not_change_are_not_quantized_anew(tmp_path, monkeypatch):
    """From the second version on, a frozen tensor is neither measured nor quantized."""
    from sparserl.sources import quantize_plan, quantized_view

    quantized = []
    write_codes = quantized_view.write_codes
    magnitudes = quantize_plan.magnitudes

    def noted(data, region, grid, *others):
        quantized.append(grid.spec.name)
        return (write_codes if others else magnitudes)(data, region, grid, *others)

    monkeypatch.setattr(quantized_view, "write_codes", noted)
    monkeypatch.setattr(quantize_plan, "magnitudes", noted)
    weights = model()
    url = f"file://{tmp_path}/fp8"
    with Publisher(f"file://{tmp_path}/bf16", weights, also={url: "fp8_blockwise"}, ladder=None) as publisher:
        publisher.publish()
        assert FROZEN in quantized
        quantized.clear()
        step(weights, 0)
        publisher.publish()
        assert "layers.0.q_proj.weight" in quantized
        assert FROZEN not in quantized


def test_weights_are_asked_for_once_and_cast_as_the_leading_run_casts_them(tmp_path):
    """fp32 weights of a function, published in bf16: the codes are those of the bf16 numbers."""
    masters = torch.nn.Sequential(torch.nn.Linear(64, 130), torch.nn.Linear(130, 48))
    calls = []

    class Source:
        def weights(self):
            calls.append(1)
            return sources.module(masters, cast=torch.bfloat16).weights()

        def files(self):
            return {"config.json": b'{"hidden": 64}'}

    runs = ("bf16", "int8")
    url = f"file://{tmp_path}/int8"
    with Publisher(f"file://{tmp_path}/bf16", Source(), also={url: sources.int8()}) as publisher:
        publisher.publish()
        calls.clear()
        with torch.no_grad():
            masters[0].weight[3] *= 1.01
        publisher.publish()
        assert len(calls) == 1
    narrow = {name: tensor.detach().to(torch.bfloat16) for name, tensor in masters.state_dict().items()}
    expected = quantized_now(narrow, "int8")
    mine = empty_like(expected)
    Subscriber(url, mine).sync()
    assert equal(mine, expected)
    configs = [json.loads(StoredRun.read(FolderStore(tmp_path / name)).files(1)["config.json"]) for name in runs]
    assert ["quantization_config" in config for config in configs] == [False, True]


def test_a_source_that_tracks_has_a_baseline_then(tmp_path):
    """`auto` keeps all bits, since old codes are made of them."""
    linear = torch.nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    url = f"file://{tmp_path}/fp8"
    source = sources.track(optimizer, linear)
    with Publisher(f"file://{tmp_path}/bf16", source, also={url: "mxfp8"}) as publisher:
        for version in range(2):
            linear(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            assert publisher.publish().also[url].version == version
        assert "host memory" in publisher.baseline
    expected = quantized_now({"weight": linear.weight.detach()}, "mxfp8")
    mine = empty_like(expected)
    Subscriber(url, mine).sync()
    assert equal(mine, expected)


def test_other_tensors_within_a_run(tmp_path):
    """A tensor that is added comes to both runs, which go on."""
    weights = model()
    url = f"file://{tmp_path}/fp8"
    with Publisher(f"file://{tmp_path}/bf16", weights, also={url: "fp8_per_channel"}) as publisher:
        runs = {publisher.publish().run}
        weights["layers.1.o_proj.weight"] = torch.ones(32, 64, dtype=torch.bfloat16)
        runs.add(publisher.publish().run)
        step(weights, 1)
        report = publisher.publish()
        assert len({*runs, report.run}) == 1
        assert (report.also[url].version, report.also[url].kind) == (2, "patch")
    expected = quantized_now(weights, "fp8_per_channel")
    mine = empty_like(expected)
    Subscriber(url, mine).sync()
    assert equal(mine, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"also": ["fp8_blockwise"]}, "must be a mapping from URLs to schemes"),
        ({"also": {"file:///tmp/x": "fp9"}}, "fp9"),
        ({"also": {"file:///tmp/x": lambda name, tensor: {}}}, "must map a URL to a scheme"),
        ({"also": {3: "nvfp4"}}, "must map a URL to a scheme"),
        ({"also": {"file:///tmp/x": "nvfp4"}, "baseline": "none"}, "takes a baseline"),
        ({"also": {"file:///tmp/x": "nvfp4"}, "writers": object()}, "one writer"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, options, message):
    """They are refused by name, before anything is written."""
    with pytest.raises(SessionError, match=message):
        Publisher(f"file://{tmp_path}/bf16", model(), **options)
    assert not (tmp_path / "bf16" / "head").exists()


def test_two_runs_cannot_have_one_store(tmp_path):
    """A quantized run in the store of another would fence it off."""
    with pytest.raises(SessionError, match="store of its own"):
        Publisher(f"file://{tmp_path}/bf16", model(), also={str(tmp_path / "bf16"): "nvfp4"})
    with pytest.raises(SessionError, match="none of the runs"):
        Publisher(f"file://{tmp_path}/bf16", model()).wait(0, 0, 0, url="file:///elsewhere")
