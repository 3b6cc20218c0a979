"""Asks for writers of answers, without a model."""

from __future__ import annotations

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.server.job import AnswerRequest, Extras, Job


def one_answer(**extras: bool) -> Job:
    return Job(
        asks=(AnswerRequest(prompt=[1], params=SamplingParams()),), spec=SpecConfig(), extras=Extras(**extras)
    )
