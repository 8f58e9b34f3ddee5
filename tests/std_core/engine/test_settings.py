"""Settings and prompts that cannot be used are refused before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from std_core import sparse_to_dense
from std_core.engine.engine import Engine
from std_core.types import GammaSchedule

OUT_OF_RANGE = [
    ("max_num_seqs", 0),
    ("max_num_seqs", -1),
    ("max_num_seqs", 2.5),
    ("prefill_chunk", 0),
    ("strict", -1),
]


@pytest.fixture(scope="module")
def llama(families: Callable[[str], Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(families("llama"), dtype=torch.float32)


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_an_engine_refuses_settings_out_of_range(engine: Engine, name: str, value: Any) -> None:
    message = f"{name} is {value}: a whole number of at least"
    with pytest.raises(ValueError, match=message):
        replace(engine, **{name: value})
    # before it looks for the checkpoint
    with pytest.raises(ValueError, match=message):
        Engine.load("/no/such/checkpoint", **{name: value})


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "tensor_parallel_size", "threads"])
def test_loading_refuses_sizes_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: a whole number of at least 1"):
        Engine.load("/no/such/checkpoint", **{name: 0})


def test_loading_refuses_unknown_settings() -> None:
    with pytest.raises(ValueError, match="max_seqs is no setting of the engine: it has max_num_s"):
        Engine.load("/no/such/checkpoint", max_seqs=4)


def test_an_engine_is_not_resized_to_no_slots(engine: Engine) -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        replace(engine).resize(0)


@pytest.mark.parametrize(("name", "value"), [*OUT_OF_RANGE, ("max_seqs", 4)])
def test_a_refused_wrapper_leaves_the_model_as_it_was(llama: Any, name: str, value: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    before = llama.generate(ids, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match=name):
        sparse_to_dense(llama, **{name: value})
    assert torch.equal(llama.generate(ids, max_new_tokens=3, do_sample=False), before)


def test_a_row_whose_tokens_are_all_masked_is_refused(llama: Any) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match="row 1 has no prompt: attention_mask masks all of its"):
        sparse_to_dense(llama).generate(ids, attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_a_batch_without_a_prompt_is_refused(llama: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="there is no prompt"):
        sparse_to_dense(llama).generate(torch.zeros(shape, dtype=torch.long), max_new_tokens=4)


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, float("nan")])
def test_a_gamma_schedule_expects_a_share(acceptance: float) -> None:
    with pytest.raises(ValueError, match="expected_acceptance is"):
        GammaSchedule(((1,),), acceptance)
