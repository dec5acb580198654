"""Nothing is lost, replaced or waited for without a word: what sessions refuse, raise and log."""

import errno
import re

import numpy as np
import pytest

import sparserl
from sparserl import Publisher, Subscriber, targets
from sparserl.errors import SessionError, StoreError, TensorMismatch, Unavailable, WeightsError
from sparserl.session import logs
from sparserl.transport.stores.versioned import split_version
from tests.cli.session_commands import invoke
from tests.session.policy import Policy, bits

# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_is_continued_without_a_state_folder(url, log):
    """The weights of the last version are rebuilt from the store, and the log says what had to be fetched."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        for _ in range(3):
            publisher.publish()
            policy.step()
    with Publisher(url, policy.weights) as again:
        assert (again.run, again.version) == (publisher.run, 2)
        report = again.publish()
    assert (report.run, report.version, report.kind) == (publisher.run, 3, "patch")
    fetching = [line for line in log("INFO") if "fetching" in line]
    assert len(fetching) == 1
    assert f"to continue run {publisher.run} at version 2" in fetching[0]
    mine = policy.empty()
    Subscriber(url, mine).sync()
    assert bits(mine) == bits(policy.weights)


def test_state_of_another_run_replaces_nothing(url, tmp_path):
    """A state folder that does not fit the store is no reason for a new run."""
    policy = Policy()
    with Publisher(f"{url}-other", policy.weights, state=tmp_path / "state") as other:
        other.publish()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
    policy.step()
    with Publisher(url, policy.weights, state=tmp_path / "state") as again:
        assert again.publish().run == publisher.run


def test_another_model_does_not_replace_a_run(url):
    """A publisher with other tensors is refused, and the run stays what it was."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
    with Publisher(url, {"other": np.zeros(3, np.float32)}) as other, pytest.raises(TensorMismatch):
        other.publish()
    mine = policy.empty()
    assert Subscriber(url, mine).sync().run == publisher.run


def test_an_unsigned_run_is_not_replaced_by_a_signed_one(url):
    """The error says which run the store has, and how to replace it; `new_run` does."""
    from sparserl.session.store.signing import keygen

    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
    secret, _ = keygen()
    with pytest.raises(SessionError, match=f"{url} has run {publisher.run} at version 0.*not signed.*new_run=True"):
        Publisher(url, policy.weights, signing_key=secret)
    with Publisher(url, policy.weights, signing_key=secret, new_run=True) as replacing:
        assert replacing.publish().run != publisher.run


def test_a_replaced_run_is_logged_by_its_subscribers(url, log):
    """Who follows a store notices that another run has begun there."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        publisher.publish()
    subscriber = Subscriber(url, policy.empty())
    subscriber.sync()
    with Publisher(url, policy.weights, new_run=True) as replacing:
        replacing.publish()
    subscriber.sync()
    assert log("WARNING") == [f"{url}: run {replacing.run} has replaced run {publisher.run}"]


# -- what is logged ----------------------------------------------------------------------------------------------------


def test_every_version_is_logged(url, log):
    """One line for each publish and each commit."""
    policy = Policy()
    with Publisher(url, policy.weights) as publisher:
        report = publisher.publish()
    Subscriber(url, policy.empty()).sync()
    published, committed = log("INFO")
    assert published == f"{url}: new run {report.run}: published {report}"
    assert committed.startswith(f"{url}: committed version 0: anchor, ")
    assert log("WARNING") == []


def test_failed_upkeep_is_logged_printed_and_counted(url, log, monkeypatch):
    """A version is published although its upkeep failed, and that shows wherever one may look."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from sparserl.session.store import maintenance

    def fail(*_args, **_options):
        raise StoreError("cannot be written") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(maintenance, "collect", fail)
    registry = prometheus_client.CollectorRegistry()
    callbacks = [sparserl.metrics.Prometheus(registry=registry)]
    with Publisher(url, Policy().weights, callbacks=callbacks, anchor_after=0.0) as publisher:
        assert publisher.publish().notes == ()
        report = publisher.publish()
    [note] = report.notes
    assert "cannot be written. `sparserl gc` with a short --grace frees space" in note
    assert str(report).splitlines()[1] == f"note: {note}"
    assert log("WARNING") == [f"{url}: version 1: {note}"]
    assert registry.get_sample_value("sparserl_upkeep_failures_total") == 1


def test_trouble_is_logged_once_and_again_after_a_while(log, monkeypatch):
    """The same reason is one line, another reason another one; after a minute, two and so on there is a reminder."""
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    trouble = logs.TroubleLog("s3://bucket/run")
    for _ in range(200):
        trouble.waiting(Unavailable("the host is down"))
        now[0] += 1
    trouble.waiting(Unavailable("the host refuses"))
    trouble.over()
    trouble.over()
    assert log("WARNING") == [
        "s3://bucket/run: waiting: the host is down",
        "s3://bucket/run: still waiting after 60 s: the host is down",
        "s3://bucket/run: still waiting after 2 m: the host is down",
        "s3://bucket/run: waiting: the host refuses",
        "s3://bucket/run: waits no more, after 3 m",
    ]


def test_following_a_store_without_a_run(tmp_path, log):
    """Time that is up before any version is an error which says why, and the wait is logged."""
    url = f"file://{tmp_path / 'mistyped'}"
    subscriber = Subscriber(url, Policy().empty())
    with pytest.raises(Unavailable, match=r"no version within 0\.2 s: .*nothing is published"):
        subscriber.follow(timeout=0.2)
    [line] = log("WARNING")
    assert line.startswith(f"{url}: waiting: ")


def test_following_ends_quietly_with_a_version(url):
    """Once there is a version, time that is up is no error."""
    policy = Policy()
    Publisher(url, policy.weights).publish()
    mine = policy.empty()
    Subscriber(url, mine).follow(timeout=0.3)
    assert bits(mine) == bits(policy.weights)


# -- sources -----------------------------------------------------------------------------------------------------------


def test_a_mapping_of_copies_is_noticed(url, log):
    """After two publishes in which nothing could have changed, once."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(8, 8)
    copies = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    with Publisher(url, copies) as publisher:
        for _ in range(5):
            torch.nn.init.normal_(model.weight)
            publisher.publish()
    [line] = log("WARNING")
    assert "sparserl.sources.module(model, cast=torch.bfloat16)" in line


@pytest.mark.parametrize("kind", ["written", "function", "module"])
def test_what_follows_the_model_is_not_called_stale(url, log, kind):
    """Tensors that were written to, though no bit changed, and sources that are asked again."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(8, 8)
    sources = {"written": dict(model.state_dict()), "function": lambda: dict(model.state_dict()), "module": model}
    with Publisher(url, sources[kind]) as publisher:
        for _ in range(4):
            with torch.no_grad():
                model.weight.mul_(1.0)
            publisher.publish()
    assert log("WARNING") == []


def test_modules_and_functions_are_sources(url):
    """As they are, or cast: parameters are what `.to(torch.bfloat16)` would give an engine, buffers as they are."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    engine = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with Publisher(url, model) as publisher:
        publisher.publish()
    Subscriber(url, engine).sync()
    assert all(torch.equal(engine[name], tensor) for name, tensor in model.state_dict().items())

    narrow = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(torch.bfloat16)
    narrow[1].running_mean = narrow[1].running_mean.float()
    narrow[1].running_var = narrow[1].running_var.float()
    mine = dict(narrow.state_dict())
    with Publisher(f"{url}-cast", sparserl.sources.module(model, cast=torch.bfloat16)) as publisher:
        publisher.publish()
        with torch.no_grad():
            model[0].weight.add_(0.25)
        assert publisher.publish().kind == "patch"
    Subscriber(f"{url}-cast", mine).sync()
    expected = {name: tensor.to(mine[name].dtype) for name, tensor in model.state_dict().items()}
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())

    with Publisher(f"{url}-function", lambda: {"w": model[0].weight.detach()}) as publisher:
        publisher.publish()


@pytest.mark.parametrize("source", [3, "weights", object(), None], ids=["number", "text", "object", "none"])
def test_what_is_no_source_is_refused(url, source):
    """At once, with what would be one."""
    with pytest.raises(WeightsError, match="it must be a torch module, a mapping of tensors, a function"):
        Publisher(url, source)


@pytest.mark.parametrize("cast", ["bfloat16", "int8"], ids=repr)
def test_what_is_no_cast_is_refused(cast):
    """A name, or a dtype that is not of floating point."""
    torch = pytest.importorskip("torch")
    wrong = cast if cast == "bfloat16" else torch.int8
    with pytest.raises(WeightsError, match=r"it must be a floating-point dtype such as torch\.bfloat16"):
        sparserl.sources.module(torch.nn.Linear(2, 2), cast=wrong)


def test_dtypes_alone_that_differ(url):
    """A float32 trainer and a bfloat16 engine: the error says `cast=`."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(8, 8)
    Publisher(url, model).publish()
    with pytest.raises(TensorMismatch, match=r"cast=torch\.bfloat16"):
        Subscriber(url, torch.nn.Linear(8, 8).to(torch.bfloat16)).sync()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["/nope", {"config.json": "text"}, {"config.json": None}], ids=repr)
def test_files_that_are_none_are_refused(url, files):
    """A folder that does not exist, and contents that are not bytes."""
    with pytest.raises(SessionError, match="files"):
        Publisher(url, Policy().weights, files=files)


def test_a_transformers_model_brings_its_config(url, tmp_path):
    """What a subscriber writes is a checkpoint that transformers loads, in the dtype that was published."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    with Publisher(url, sparserl.sources.module(model, cast=torch.bfloat16), files={"extra.txt": b"x"}) as publisher:
        publisher.publish()
    with Subscriber(url, targets.folder(tmp_path / "out")) as subscriber:
        subscriber.sync()
    current = tmp_path / "out" / "current"
    assert (current / "generation_config.json").is_file()
    assert (current / "extra.txt").read_bytes() == b"x"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(current, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert type(loaded) is type(model)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


# -- stores as paths ---------------------------------------------------------------------------------------------------


def test_paths_are_stores(tmp_path, monkeypatch):
    """A path, relative or not, as text or as a Path, is the same store as its URL."""
    policy = Policy()
    with Publisher(tmp_path / "store", policy.weights) as publisher:
        publisher.publish()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("store", "./store", str(tmp_path / "store"), tmp_path / "store", "~/store", f"file://{tmp_path}/store"):
        mine = policy.empty()
        assert Subscriber(url, mine).sync().run == publisher.run
        assert bits(mine) == bits(policy.weights)


def test_urls_of_files_are_decoded(tmp_path, monkeypatch):
    """As `Path.as_uri()` writes them, in any case; a plain path is what it says, though it has a percent sign in it."""
    policy = Policy()
    for name in ("sp ace ü", "100%", "a%20b", "a?b#c", "ends@3"):
        folder = tmp_path / name
        with Publisher(folder.as_uri(), policy.weights) as publisher:
            publisher.publish()
            assert publisher.store.url == folder.as_uri()
        assert (folder / "head.json").is_file()
        for url in (folder, str(folder), folder.as_uri(), folder.as_uri().replace("file", "FILE", 1)):
            target, mirror = folder.with_name(f"{name}-held"), folder.with_name(f"{name}-mirror")
            with Subscriber(url, sparserl.targets.folder(target.as_uri()), mirror=mirror.as_uri()) as subscriber:
                subscriber.sync()
                assert subscriber.version == 0
            assert (target / "current").exists()
            assert (mirror / "head.json").exists()
        assert split_version(folder.as_uri()) == (folder.as_uri(), None)
        assert split_version(f"{folder.as_uri()}@7") == (folder.as_uri(), 7)
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path.as_uri().upper()[:4] + tmp_path.as_uri()[4:] + "/100%25@0", "100%@0"):
        assert invoke("export", url, "-o", tmp_path / f"out-{len(url)}").exit_code == 0
    assert len(list(tmp_path.iterdir())) == 3 * 5 + 2
    with pytest.raises(sparserl.SparserlError, match="has a zero in it"):
        Subscriber(f"{tmp_path.as_uri()}/a%00b", policy.weights)


@pytest.mark.parametrize("url", ["s3:bucket/run", "s3:/bucket/run", "ftp://host/run", "s3://", "http:host", ""])
def test_what_looks_like_a_url_is_no_path(url):
    """A mistyped URL does not become a folder."""
    with pytest.raises(sparserl.SparserlError, match=re.compile("is not the URL of a store|is empty")):
        Publisher(url, Policy().weights)


def test_two_sessions_may_each_have_metrics(url):
    """Prometheus objects of one registry count together."""
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    policy = Policy()
    with Publisher(url, policy.weights, callbacks=[sparserl.metrics.Prometheus(registry)]) as publisher:
        publisher.publish()
    Subscriber(url, policy.empty(), callbacks=[sparserl.metrics.Prometheus(registry)]).sync()
    for side in ("publish", "commit"):
        assert registry.get_sample_value("sparserl_version", {"side": side}) == 0
    assert registry.get_sample_value("sparserl_publish_seconds_count") == 1
