from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.batch.pack import TokenMicroBatch, TrajectoryBatch
from penstock.engines.models import (
    ActorCriticPolicy,
    GymnasiumPolicy,
    LanguagePolicy,
    ModelSpec,
    TinyLanguageModel,
    build,
)
from penstock.engines.policy import PolicyEngine
from penstock.errors import ConfigError, RunFailed
from penstock.runtime.tensors import device_bytes, module_tensors
from penstock.train import checkpoint
from penstock.train.objectives import EpisodeObjective, Objective, TokenObjective
from penstock.train.settings import OptimizerSection, PpoLossSection, TokenLossSection
from penstock.train.step import Learner


def language_batches(seed: int) -> list[TokenMicroBatch]:
    rng = np.random.default_rng(seed)
    mask = np.zeros((4, 8), np.uint8)
    mask[:, 4:] = 1
    return [
        TokenMicroBatch(
            rng.integers(3, 9, (4, 8), dtype=np.int32),
            np.tile(np.arange(8, dtype=np.int32), (4, 1)),
            np.repeat(np.arange(4, dtype=np.int16)[:, None], 8, 1),
            mask,
            (mask * -2.2).astype(np.float32),
            rng.normal(size=4).astype(np.float32),
            np.full(4, 4),
            np.full(4, 4),
        )
        for _ in range(3)
    ]


def control_batches(seed: int) -> list[TrajectoryBatch]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 40, 6)
    steps = int(lengths.sum())
    return [
        TrajectoryBatch(
            rng.normal(size=(steps, 4)).astype(np.float32),
            rng.integers(0, 2, steps),
            np.full(steps, -0.69, np.float32),
            np.ones(steps, np.float32),
            lengths,
            np.ones(6, np.uint8),
            rng.normal(size=(6, 4)).astype(np.float32),
        )
    ]


LANGUAGE = TinyLanguageModel(alphabet="abcdef", hidden_size=16, layers=1, heads=2, max_positions=16)
CONTROL = GymnasiumPolicy((4,), "discrete", 2, hidden_size=16)
NORMALIZED = GymnasiumPolicy((4,), "discrete", 2, hidden_size=16, normalize_observations=True, normalize_rewards=True)
SEVERAL_UPDATES = OptimizerSection(epochs=2, minibatches=2, schedule="linear", decay_steps=10)
KINDS = {
    "language": (LANGUAGE, TokenLossSection(), OptimizerSection(warmup_steps=3), language_batches),
    "language, several updates": (LANGUAGE, TokenLossSection(), SEVERAL_UPDATES, language_batches),
    "control": (CONTROL, PpoLossSection(), SEVERAL_UPDATES, control_batches),
    "control, normalised": (NORMALIZED, PpoLossSection(), SEVERAL_UPDATES, control_batches),
}


def objective(spec: ModelSpec, loss: TokenLossSection | PpoLossSection, **more: Any) -> Objective:
    policy = build(spec)
    return (
        TokenObjective(policy, loss, **more, packing="padded")
        if isinstance(loss, TokenLossSection)
        else EpisodeObjective(policy, loss)
    )


def learner(spec: ModelSpec, loss: TokenLossSection | PpoLossSection, optim: OptimizerSection) -> Learner:
    return Learner(objective(spec, loss), optim)


def small() -> Learner:
    return learner(CONTROL, PpoLossSection(), OptimizerSection())


def tensors(owner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in {**owner.policy.named_tensors(), **owner.state()}.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_gives_the_same_numbers_as_never_stopping(kind: str, tmp_path: Path) -> None:
    spec, loss, optim, batches = KINDS[kind]
    straight = learner(spec, loss, optim)
    unbroken = [straight.step(batches(step)) for step in range(6)]

    first = learner(spec, loss, optim)
    broken = [first.step(batches(step)) for step in range(3)]
    checkpoint.save(tmp_path, first)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 3
    second = learner(spec, loss, optim)
    checkpoint.load(found, second)
    broken += [second.step(batches(step)) for step in range(3, 6)]

    assert broken == unbroken
    assert same(tensors(second), tensors(straight))


def test_statistics_of_observations_and_rewards_travel_with_weights_and_checkpoints(tmp_path: Path) -> None:
    trained = learner(NORMALIZED, PpoLossSection(discount=0.9), OptimizerSection())
    batches = [control_batches(seed)[0] for seed in range(3)]
    for batch in batches:
        trained.step([batch])
    seen = np.concatenate([batch.observations_S for batch in batches])
    published = trained.policy.named_tensors()
    assert published["observed.mean"].numpy() == pytest.approx(seen.mean(0), abs=1e-5)
    assert published["observed.variance"].numpy() == pytest.approx(seen.var(0), abs=1e-5)
    assert published["observed.count"].item() == len(seen)
    returns = [(1 - 0.9**left) / 0.1 for b in batches for n in b.lengths_N for left in range(n, 0, -1)]
    assert published["rewarded.variance"].item() == pytest.approx(np.var(returns), rel=1e-4)

    checkpoint.save(tmp_path, trained)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    resumed = learner(NORMALIZED, PpoLossSection(discount=0.9), OptimizerSection())
    checkpoint.load(found, resumed)
    assert same(tensors(resumed), tensors(trained))

    # A replica, as in generation and evaluation: it normalises with what it was given, and adds nothing of its own.
    replica = PolicyEngine(build(NORMALIZED).module)
    strange = np.full((8, 4), 5.0, np.float32)
    before = replica.act(strange, greedy=True)[1]
    replica.stage({name: tensor.clone() for name, tensor in published.items()})
    replica.swap(3, "")
    after = replica.act(strange, greedy=True)[1]
    assert not np.array_equal(before, after)
    assert same(module_tensors(replica.module), published)


def test_normalised_policies_see_scaled_observations_and_bounded_rewards() -> None:
    policy = build(NORMALIZED)
    assert isinstance(policy, ActorCriticPolicy)
    network = policy.network
    rng = np.random.default_rng(0)
    observations = torch.from_numpy(rng.normal([1000.0, 0.0, -3.0, 7.0], [50.0, 1e-3, 1.0, 0.0], (500, 4)))
    network.observe_episodes(observations.float(), torch.from_numpy(rng.normal(0, 4.0, 500)))
    inputs = network._inputs(observations.float())
    assert inputs.mean(0).tolist() == pytest.approx([0] * 4, abs=1e-2)
    assert inputs.std(0).tolist() == pytest.approx([1, 1, 1, 0], abs=2e-2)  # one that never changes stays as it is
    assert network._inputs(torch.full((1, 4), 1e6)).abs().max() == 10
    assert network.normalized(torch.tensor([4.0, 1e6])).tolist() == pytest.approx([1.0, 10.0], rel=0.1)
    count = network.observed.count.item()  # type: ignore[union-attr]
    network.observe_episodes(torch.full((2, 4), torch.nan), torch.zeros(0))
    assert network.observed.count.item() == count  # type: ignore[union-attr]
    assert torch.isfinite(network.value(observations.float())).all()


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_finite_and_complete(kind: str) -> None:
    spec, loss, optim, batches = KINDS[kind]
    metrics = learner(spec, loss, optim).step(batches(0))
    assert {"loss", "entropy", "grad_norm", "ratio_mean", "ratio_max", "clip_fraction", "tokens"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_step_counts_and_changes_nothing(kind: str) -> None:
    spec, loss, optim, _ = KINDS[kind]
    owner = learner(spec, loss, optim)
    before = {name: tensor.clone() for name, tensor in owner.policy.named_tensors().items()}
    assert owner.step([])["tokens"] == 0
    assert owner.steps == 1
    assert same(before, owner.policy.named_tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_step_is_told_of(kind: str) -> None:
    spec, loss, optim, batches = KINDS[kind]
    told: list[str] = []
    Learner(objective(spec, loss), optim, progressed=told.append).step(batches(0))
    parts = optim.epochs * (len(batches(0)) if not kind.startswith("control") else optim.minibatches)
    assert len([line for line in told if line.startswith("training step 0: ")]) == parts


def test_positive_advantage_makes_tokens_more_likely() -> None:
    owner = learner(LANGUAGE, TokenLossSection(), OptimizerSection(learning_rate=1e-2))
    batches = language_batches(0)
    for batch in batches:
        batch.advantages_N[:] = 1.0
    entropies = [owner.step(batches)["kl_sampling"] for _ in range(20)]
    assert entropies[-1] > entropies[0] + 0.1


def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_the_weights() -> None:
    owner = learner(LANGUAGE, TokenLossSection(), OptimizerSection(skip_updates=2))
    owner.step(language_batches(0))
    before = tensors(owner)
    poisoned = language_batches(1)
    poisoned[1].advantages_N[2] = np.nan
    for _ in range(2):
        assert owner.step(poisoned)["skipped_updates"] > 0
    owner.steps = 1
    with pytest.raises(RunFailed, match=r"training step 1 gave loss nan.* like 2 before it"):
        owner.step(poisoned)
    assert same(before, tensors(owner))
    owner.step(language_batches(1))


def test_a_gradient_that_is_not_a_number_stops_the_run_and_keeps_the_weights() -> None:
    owner = learner(CONTROL, PpoLossSection(), OptimizerSection(skip_updates=0))
    before = tensors(owner)
    poisoned = control_batches(0)
    poisoned[0].rewards_S[0] = np.inf
    with pytest.raises(RunFailed, match="not applied"):
        owner.step(poisoned)
    assert same(before, tensors(owner))


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = OptimizerSection(learning_rate=1.0, warmup_steps=3, schedule="linear", decay_steps=10, final_fraction=0)
    owner = learner(CONTROL, PpoLossSection(), settings)
    assert [owner.learning_rate(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert [owner.learning_rate(step) for step in (4, 8, 10)] == pytest.approx([6 / 7, 2 / 7, 0])
    assert owner.learning_rate(50) == 0


def test_a_warm_up_as_long_as_the_run_never_decays_below_the_end() -> None:
    settings = OptimizerSection(learning_rate=1.0, warmup_steps=5, schedule="cosine", decay_steps=5)
    owner = learner(CONTROL, PpoLossSection(), settings)
    assert [owner.learning_rate(step) for step in (4, 5, 6)] == pytest.approx([5 / 6, 1.0, 0.1])


def test_a_reference_is_asked_for_when_the_divergence_counts() -> None:
    settings = TokenLossSection(kl_coefficient=0.1)
    with pytest.raises(ConfigError, match="reference"):
        learner(LANGUAGE, settings, OptimizerSection())
    reference = build(LANGUAGE)
    assert isinstance(reference, LanguagePolicy)
    owner = Learner(objective(LANGUAGE, settings, reference=reference), OptimizerSection(learning_rate=1e-2))
    divergences = [owner.step(language_batches(step))["kl_reference"] for step in range(4)]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[-1] > 1e-4


def test_policy_and_loss_must_be_of_one_kind() -> None:
    with pytest.raises(ConfigError, match="cannot be trained"):
        TokenObjective(build(CONTROL), packing="padded")
    with pytest.raises(ConfigError, match="cannot be trained"):
        EpisodeObjective(build(LANGUAGE))


def test_old_checkpoints_are_pruned(tmp_path: Path) -> None:
    owner = small()
    for step in range(4):
        owner.step(control_batches(step))
        checkpoint.save(tmp_path, owner, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    owner = small()
    first = checkpoint.save(tmp_path, owner)
    (first.directory / checkpoint.MODEL_FILE).write_bytes(b"not a model")
    assert checkpoint.latest(tmp_path) is None
    again = checkpoint.save(tmp_path, owner)
    assert checkpoint.latest(tmp_path) == again
    assert again.directory == first.directory


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_while_a_step_is_saved_again_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    owner = small()
    checkpoint.save(tmp_path, owner, keep=1)
    rename, calls = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        if path.is_dir():  # a checkpoint, not one of its files
            calls.append(path.name)
            if len(calls) == killed_at:
                raise SystemExit
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(SystemExit):
            checkpoint.save(tmp_path, owner, keep=1)
    assert len(calls) == killed_at
    found = checkpoint.latest(tmp_path)
    assert found is not None
    checkpoint.load(found, small())
    owner.step(control_batches(0))
    checkpoint.save(tmp_path, owner, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000000", "step-00000001"]


def test_a_step_that_cannot_be_saved_again_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = small()
    first = checkpoint.save(tmp_path, owner)
    rename = Path.rename

    def broken(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial-"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(RunFailed, match="Earlier checkpoints are untouched"):
        checkpoint.save(tmp_path, owner)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert checkpoint.latest(tmp_path) == first


def test_a_damaged_newer_checkpoint_does_not_count_as_one_that_is_kept(tmp_path: Path) -> None:
    owner = small()
    for step in (20, 40):
        owner.steps = step
        checkpoint.save(tmp_path, owner)
    flip(tmp_path / "step-00000040" / checkpoint.MODEL_FILE)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    resumed = small()
    checkpoint.load(found, resumed)
    resumed.steps = 25
    saved = checkpoint.save(tmp_path, resumed, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000025"]
    assert checkpoint.latest(tmp_path) == saved
    assert checkpoint.last_resort(tmp_path, keep=1) == 25


DAMAGES = {
    "cut short": lambda path: os.truncate(path / checkpoint.MODEL_FILE, 100),
    "one bit": lambda path: flip(next(path.glob("*.distcp"))),
    "one bit of what would be unpickled": lambda path: flip(path / ".metadata"),
    "file gone": lambda path: (path / checkpoint.MODEL_FILE).unlink(),
    "record gone": lambda path: (path / checkpoint.RECORD_FILE).unlink(),
    "record not JSON": lambda path: (path / checkpoint.RECORD_FILE).write_text("{"),
    "record not text": lambda path: (path / checkpoint.RECORD_FILE).write_bytes(b'{"step": 2, "files": {"\xff": 1}}'),
    "another format": lambda path: (path / checkpoint.RECORD_FILE).write_text(
        '{"step": 2, "files": {}, "format_version": 99}'
    ),
    "a path outside": lambda path: (path / checkpoint.RECORD_FILE).write_text(
        '{"step": 2, "files": {"../../etc/passwd": {"size_bytes": 1, "digest": ""}}}'
    ),
}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    owner = small()
    for step in range(2):
        owner.step(control_batches(step))
        checkpoint.save(tmp_path, owner)
    DAMAGES[damage](tmp_path / "step-00000002")
    with caplog.at_level(logging.WARNING):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step-00000002" in caplog.text
    checkpoint.load(found, small())


def test_a_half_written_checkpoint_never_counts(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    owner = small()
    owner.step(control_batches(0))
    checkpoint.save(tmp_path, owner)
    (tmp_path / "step-00000001").rename(tmp_path / ".partial-00000001")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, owner)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = small()
    checkpoint.save(tmp_path, owner)
    owner.step(control_batches(0))

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_parts", no_space)
    with pytest.raises(RunFailed, match="No space left on device"):
        checkpoint.save(tmp_path, owner)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 0


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    found = checkpoint.save(tmp_path, small())
    other = learner(GymnasiumPolicy((4,), "discrete", 2, hidden_size=8), PpoLossSection(), OptimizerSection())
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(found, other)


def test_a_learner_that_moved_trains_as_one_that_stayed():
    moved, stayed = (learner(LANGUAGE, TokenLossSection(), OptimizerSection()) for _ in range(2))
    for seed in range(3):
        moved.onload(torch.device("cpu"))
        metrics = moved.step(language_batches(seed))
        moved.offload()
        assert device_bytes() == 0
        assert metrics == stayed.step(language_batches(seed))
    assert all(torch.equal(a, b) for a, b in zip(moved.state().values(), stayed.state().values(), strict=True))


def with_reference(optim: OptimizerSection) -> Learner:
    reference = build(LANGUAGE)
    assert isinstance(reference, LanguagePolicy)
    return Learner(objective(LANGUAGE, TokenLossSection(kl_coefficient=0.1), reference=reference), optim)


def whereabouts(it: Learner) -> dict[str, set[str]]:
    assert it.objective.reference is not None
    optimiser = {tensor.device.type for name, tensor in it.state().items() if name.startswith("exp_avg")}
    return {
        "policy": {tensor.device.type for tensor in it.policy.named_tensors().values()},
        "optimizer": optimiser,
        "reference": {tensor.device.type for tensor in it.objective.reference.named_tensors().values()},
    }


def test_the_parts_of_a_learner_move_one_by_one_or_all_at_once():
    it = with_reference(OptimizerSection())
    it.step(language_batches(0))
    it.onload(torch.device("meta"), ("reference",))
    assert whereabouts(it) == {"policy": {"cpu"}, "optimizer": {"cpu"}, "reference": {"meta"}}
    it.onload(torch.device("meta"))
    assert whereabouts(it) == {"policy": {"meta"}, "optimizer": {"meta"}, "reference": {"meta"}}
    assert {tensor.device.type for name, tensor in it.state().items() if name.startswith("step/")} == {"meta"}
    plain = with_reference(OptimizerSection(options={"foreach": False}))  # its counts of steps are always on the host
    plain.step(language_batches(0))
    plain.onload(torch.device("meta"))
    assert {tensor.device.type for name, tensor in plain.state().items() if name.startswith("step/")} == {"cpu"}


@pytest.mark.parametrize("optim", [OptimizerSection(), OptimizerSection(epochs=2, minibatches=2)])
def test_scored_in_a_phase_of_its_own_a_step_is_the_same(optim: OptimizerSection):
    apart, at_once = with_reference(optim), with_reference(optim)
    reference, divergences = apart.objective.reference, []
    for seed in range(3):
        scores = apart.score(language_batches(seed))
        apart.objective.reference = None  # training needs only what it said
        found = apart.step(language_batches(seed), scores)
        apart.objective.reference = reference
        assert found == at_once.step(language_batches(seed))
        divergences.append(found["kl_reference"])
    assert max(divergences) > 0, "what was compared with the reference had something to differ by"
    assert same(tensors(apart), tensors(at_once))


def test_what_scoring_needs():
    assert learner(LANGUAGE, TokenLossSection(), OptimizerSection()).scored_by == ()
    assert with_reference(OptimizerSection()).scored_by == ("reference",)
    assert with_reference(OptimizerSection(minibatches=2)).scored_by == ("policy", "reference")
    several = learner(CONTROL, PpoLossSection(), OptimizerSection(epochs=2))
    assert several.scored_by == (), "a control policy compares with the samples alone"


class Calls:
    """Pickled, it calls `print` when it is read."""

    def __reduce__(self) -> Any:
        return print, ("called",)


def with_metadata(saved: checkpoint.Checkpoint, change: Callable[[Any], None]) -> checkpoint.Checkpoint:
    """The checkpoint with other metadata and their digest: only what the digests do not show is wrong."""
    path = saved.directory / ".metadata"
    with path.open("rb") as file:
        metadata = pickle.Unpickler(file).load()  # noqa: S301
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    files = saved.record.files | {".metadata": checkpoint._describe(path)}
    record = msgspec.structs.replace(saved.record, files=files)
    (saved.directory / checkpoint.RECORD_FILE).write_bytes(msgspec.json.encode(record))
    return checkpoint.verify(saved.directory)


def test_metadata_of_a_checkpoint_calls_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(metadata: Any) -> None:
        metadata.storage_meta.checkpoint_id = Calls()

    saved = with_metadata(checkpoint.save(tmp_path, small()), call)
    with pytest.raises(ConfigError, match=r"names builtins\.print, which no checkpoint contains"):
        checkpoint.load(saved, small())
    assert capsys.readouterr().out == ""
    with (saved.directory / ".metadata").open("rb") as file:
        pickle.Unpickler(file).load()  # noqa: S301
    assert capsys.readouterr().out == "called\n"  # the witness: another unpickler calls it


@pytest.mark.parametrize("name", ["../outside", "/outside", "inner/../../outside"])
def test_metadata_of_a_checkpoint_name_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    def lead(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    saved = with_metadata(checkpoint.save(tmp_path, small()), lead)
    with pytest.raises(ConfigError, match="names the file"):
        checkpoint.load(saved, small())


def test_metadata_that_are_no_metadata(tmp_path: Path) -> None:
    saved = with_metadata(checkpoint.save(tmp_path, small()), lambda metadata: None)
    checkpoint.load(saved, small())
    for damaged in (b"", b"\x80\x04K\x05.", b"\x80\x04]\x94e."):
        (saved.directory / ".metadata").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            checkpoint.load(saved, small())
