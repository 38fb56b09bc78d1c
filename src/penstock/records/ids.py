"""Typed identifiers. They are compared and passed on, never glued together and never parsed."""

from __future__ import annotations

from typing import NewType

RunId = NewType("RunId", str)
"""Random per run directory; part of every shared-memory header and every token check."""

PipelineName = NewType("PipelineName", str)
"""The `name` of a `[[pipeline]]` table."""

POOL = PipelineName("<pool>")
"""In the journal, stands where a pipeline's name would for what concerns them all. No pipeline can be called so."""

MemberId = NewType("MemberId", str)
"""One incarnation of one process: a restarted worker is a new member."""

PromptIndex = NewType("PromptIndex", int)
"""Position in a pipeline's endless, deterministic prompt stream: the whole of a resumable cursor."""

SampleId = NewType("SampleId", int)
"""One attempt to generate one member of a prompt's group; counted up per pipeline, never reused."""

FIRST_EVALUATION_SAMPLE = SampleId(1 << 40)
"""Samples of evaluations are numbered from here on, so that no number means a training sample as well."""

StepIndex = NewType("StepIndex", int)
"""Optimiser step, from 0. Step `s` starts from weights version `s` and ends with version `s + 1`."""

Version = NewType("Version", int)
"""How many optimiser steps went into the weights: version 0 is the initial model."""
