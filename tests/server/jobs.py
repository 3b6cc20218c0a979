"""Jobs for writers of answers, without a model."""

from __future__ import annotations

from mlxspec.config import SamplingParams, SpecConfig
from mlxspec.server.request_parsing import AnswerRequest, Job


def one_answer() -> Job:
    return Job(asks=(AnswerRequest(prompt=[1], params=SamplingParams()),), spec=SpecConfig())
