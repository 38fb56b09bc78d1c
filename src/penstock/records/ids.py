"""Typed identifiers. They are compared and passed on, never concatenated and never parsed."""

from __future__ import annotations

from typing import NewType

RunId = NewType("RunId", str)
"""Random per run directory; part of every shared-memory header and every token check."""

PipelineName = NewType("PipelineName", str)
"""The `name` of a `[[pipeline]]` table."""

POOL = PipelineName("<pool>")
"""Replaces the pipeline name in journal entries of the device pool. No pipeline can have this name."""

MemberId = NewType("MemberId", str)
"""One incarnation of one process: a restarted worker is a new member."""

PromptIndex = NewType("PromptIndex", int)
"""Position in a pipeline's endless, deterministic prompt stream. A resume needs no other cursor."""

SampleId = NewType("SampleId", int)
"""One attempt to generate one member of a prompt's group. A counter per pipeline, never reused."""

FIRST_EVALUATION_SAMPLE = SampleId(1 << 40)
"""The first id of evaluation samples, so that their ids never equal those of training samples."""

StepIndex = NewType("StepIndex", int)
"""Optimiser step, from 0. Step `s` starts from weights version `s` and ends with version `s + 1`."""

Version = NewType("Version", int)
"""Number of optimiser steps applied to the weights; version 0 is the initial model."""
