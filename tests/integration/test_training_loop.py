"""The training loop with a scripted controller, data loader and learner, on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.records.ids import StepIndex
from penstock.sim.loop import virtual_loop
from penstock.train.loop import TrainingLoop
from penstock.train.rank_calls import Save, Train
from penstock.train.settings import CheckpointSection
from penstock.wire.messages import AckCheckpoint, AckStep, Ok

STEP_S = 10.0
FETCH_S = 1.0
PUBLISH_S = 60.0


@dataclass
class Scene:
    """Everything around the loop. A request for a batch is answered after `answer_s`; a step takes `STEP_S`."""

    folder: Path
    answer_s: float
    batches: int = 3
    stop_in_step: int | None = None
    durable_s: float = 0.5
    """How long it takes until the version of a checkpoint is published and flushed; at most `PUBLISH_S`."""
    learner: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            steps=0, step=None, scored_by=(), policy=SimpleNamespace(named_tensors=dict, snapshot=dict)
        )
    )
    stop: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(requested=False))
    acknowledged: list[AckStep] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    async def prepare(self, step: StepIndex) -> Any:
        if step == self.batches:
            return None
        await asyncio.sleep(self.answer_s + FETCH_S)
        made = SimpleNamespace(step=step, micro_batches=[], answered_s=self.answer_s, prepared_s=FETCH_S, figures={})
        made.missing_prompts, made.missing_reason, made.done, made.drawn_now = (), "", lambda: None, []
        return made

    async def together(self, order: Train | Save, *work: Any) -> tuple[dict[str, float], list[Any]]:
        if isinstance(order, Save):
            self.saved.append(self.learner.steps)
        else:
            await asyncio.sleep(STEP_S / 2)
            self.stop.requested = self.stop.requested or self.stop_in_step == order.step
            await asyncio.sleep(STEP_S / 2)
            self.learner.steps += 1
        return {}, []

    async def call(self, request: Any) -> Ok:
        self.calls.append(request)
        if isinstance(request, AckStep):
            self.acknowledged.append(request)
        return Ok()

    def loop(self) -> TrainingLoop:
        async def done(*_: Any, **__: Any) -> bool:
            return True

        run = SimpleNamespace(checkpoints=lambda name: self.folder)
        progress = SimpleNamespace(moved=lambda doing: None)
        process: Any = SimpleNamespace(run=run, pipeline_name="p", member="t", stop=self.stop, progress=progress)
        client: Any = SimpleNamespace(call=self.call, pipeline="p")
        learner: Any = self.learner
        data: Any = SimpleNamespace(prepare=self.prepare, awaited=False)

        async def make_durable(*_: Any) -> None:
            await asyncio.sleep(self.durable_s)

        publishing: Any = SimpleNamespace(publish=done, make_durable=make_durable, offer=lambda *_: None, last_s=0.0)
        turns: Any = SimpleNamespace(take=done, release=done, waited_s=0.0)
        ranks: Any = SimpleNamespace(together=self.together, send_all=lambda order: None)
        rollouts: Any = SimpleNamespace(writes=lambda step: False)
        settings = CheckpointSection(every_steps=100)
        return TrainingLoop(process, client, learner, data, publishing, turns, ranks, rollouts, settings, PUBLISH_S)

    def run(self) -> None:
        async def main() -> None:
            await self.loop().run(StepIndex(0))

        with virtual_loop(lambda offload, function: 0.0) as loop:
            loop.run_until_complete(main())


@pytest.mark.parametrize("answer_s", [4.0, 14.0])
def test_a_batch_that_is_ready_when_a_stop_is_requested_is_not_trained(tmp_path: Path, answer_s: float) -> None:
    scene = Scene(tmp_path, batches=10, answer_s=answer_s, stop_in_step=2)
    scene.run()
    assert [ack.step for ack in scene.acknowledged] == [0, 1, 2], "the step in progress is completed"
    assert scene.saved == [3]


@pytest.mark.parametrize(("answer_s", "idle_s"), [(4.0, 0.0), (14.0, 5.0)])
def test_only_the_time_after_the_step_before_is_a_wait(tmp_path: Path, answer_s: float, idle_s: float) -> None:
    scene = Scene(tmp_path, answer_s=answer_s)
    scene.run()
    first, *later = [ack.metrics for ack in scene.acknowledged]
    assert first["wait_s"] == answer_s + FETCH_S
    assert [one["wait_s"] for one in later] == [idle_s, idle_s]
    assert [(one["batch_s"], one["fetch_s"], one["step_s"]) for one in later] == [(answer_s, FETCH_S, STEP_S)] * 2


def test_a_publication_that_never_ends_ends_the_trainer(tmp_path: Path) -> None:
    scene = Scene(tmp_path, answer_s=4.0, batches=2, durable_s=1e6)
    with pytest.raises(TimeoutError):
        scene.run()
    assert len(scene.acknowledged) == 2
    assert scene.saved == [2], "the checkpoint was written, and never reported"
    assert not any(isinstance(call, AckCheckpoint) for call in scene.calls)
    slow = Scene(tmp_path, answer_s=4.0, batches=2, durable_s=PUBLISH_S - 1)
    slow.run()
    assert any(isinstance(call, AckCheckpoint) for call in slow.calls)
