"""Attaching an engine to a user's model: what the user sees of it, and what the user may change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from std_core import sparse_to_dense
from std_core.generate import SparseToDense
from std_core.types import Draft

DRAFT = Draft("random", k=2, gamma=3)
IDS = torch.arange(100, 120)[None]
OTHER_IDS = torch.arange(130, 144)[None]


@pytest.fixture
def hf(families: Callable[[str], Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(families("llama"), dtype=torch.float32)


def generate(hf: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    return hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **options
    )


def fast_generate(fast: SparseToDense, ids: torch.Tensor = IDS) -> torch.Tensor:
    return fast.generate(ids, max_new_tokens=12, do_sample=False)


def in_another_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def visible_state(hf: Any) -> list[Any]:
    """What a user can see of a model."""
    attributes = [
        (module, type(module), {**vars(module)}, {**module._parameters}, {**module._modules})
        for module in hf.modules()
    ]
    return [hf.config.to_dict(), hf.config._attn_implementation, attributes]


# --------------------------------------------------------------------------- the model is as it was


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_nothing_of_the_model_changes(families: Callable[[str], Path], family: str) -> None:
    auto = AutoModelForCausalLM if family == "llama" else AutoModelForImageTextToText
    hf = auto.from_pretrained(families(family), dtype=torch.float32, attn_implementation="eager")
    hf.train()
    hf.get_decoder().layers[1].eval()
    before = visible_state(hf)
    fast_generate(sparse_to_dense(hf, DRAFT))
    assert visible_state(hf) == before
    assert hf.training
    assert not hf.get_decoder().layers[1].training


def test_the_view_shares_all_tensors(hf: Any) -> None:
    view = sparse_to_dense(hf)._engine.model.view
    for name, tensor in hf.state_dict(keep_vars=True).items():
        assert view.state_dict(keep_vars=True)[name] is tensor
    assert {id(b) for b in view.buffers()} == {id(b) for b in hf.buffers()}
    assert not {id(m) for m in view.modules()} & {id(m) for m in hf.modules()}


class _AtEachStep(StoppingCriteria):
    """Calls a function at each step of `generate`; does not stop."""

    def __init__(self, call: Callable[[], Any]):
        self.results: list[Any] = []
        self.call = call

    def __call__(self, ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.results.append(self.call())
        return torch.zeros(len(ids), dtype=torch.bool)


def test_the_models_own_generate_runs_beside_ours(hf: Any) -> None:
    expected = generate(hf)
    expected_other = generate(hf, OTHER_IDS)
    fast = sparse_to_dense(hf, DRAFT)
    steps = _AtEachStep(lambda: in_another_thread(lambda: fast_generate(fast, OTHER_IDS)))
    assert torch.equal(generate(hf, stopping_criteria=StoppingCriteriaList([steps])), expected)
    assert len(steps.results) == 12
    assert all(torch.equal(ids, expected_other) for ids in steps.results)


def test_two_wrappers_run_beside_each_other_and_beside_the_model(
    hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(hf)
    expected_other = generate(hf, OTHER_IDS)
    first = sparse_to_dense(hf, DRAFT)
    second = sparse_to_dense(hf, Draft("full", gamma=2))
    step = first._engine.model.step
    seen = []

    def step_with_others_between(*args: Any) -> torch.Tensor:
        seen.append(in_another_thread(lambda: fast_generate(second, OTHER_IDS)))
        seen.append(in_another_thread(lambda: generate(hf, OTHER_IDS)))
        return step(*args)

    monkeypatch.setattr(first._engine.model, "step", step_with_others_between)
    assert torch.equal(fast_generate(first), expected)
    assert seen and all(torch.equal(ids, expected_other) for ids in seen)


def test_one_wrapper_in_two_threads_gives_each_its_own_text_and_results(hf: Any) -> None:
    prompts = [IDS, OTHER_IDS]
    expected = [generate(hf, ids) for ids in prompts]
    fast = sparse_to_dense(hf, DRAFT)
    barrier = threading.Barrier(2)

    def call(number: int) -> None:
        for _ in range(3):
            barrier.wait()
            ids = fast_generate(fast, prompts[number])
            barrier.wait()  # the other thread has finished its call as well
            assert torch.equal(ids, expected[number])
            new = expected[number][0, prompts[number].shape[1] :].tolist()
            assert [r.token_ids for r in fast.results] == [new[: len(fast.results[0].token_ids)]]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2)))
    assert fast.results == []  # this thread has made no call


# ----------------------------------------------------------------------------- refused constructors


class _Wrapper(nn.Module):
    """Not a transformers model, though it has a configuration and a `generate`."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.generate = inner.generate


def _with_hook(hf: Any) -> Any:
    hf.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    return hf


def _with_replaced_forward(hf: Any) -> Any:
    inner = hf.model.layers[0].mlp.forward
    hf.model.layers[0].mlp.forward = lambda x: inner(x) * 2
    return hf


def _encoder_decoder() -> Any:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, num_heads=2))


REFUSED: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "no head": (lambda hf, path: AutoModel.from_pretrained(path), "has no output head for tokens"),
    "a classification head": (
        lambda hf, path: AutoModelForSequenceClassification.from_pretrained(path),
        "has no output head for tokens",
    ),
    "another class": (lambda hf, path: _Wrapper(hf), "is no transformers model"),
    "an encoder": (lambda hf, path: _encoder_decoder(), "has an encoder for its prompts"),
    "meta weights": (lambda hf, path: hf.to("meta"), "is offloaded"),
    "a hook": (lambda hf, path: _with_hook(hf), "forward hook .*model.layers.1.mlp"),
    "a replaced forward": (
        lambda hf, path: _with_replaced_forward(hf),
        "`forward` that was replaced .*model.layers.0.mlp",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_model_is_as_it_was(case: str, hf: Any, families: Callable[[str], Path]) -> None:
    make, reason = REFUSED[case]
    model = make(hf, families("llama"))
    inner = getattr(model, "inner", model)
    before = visible_state(inner)
    with pytest.raises(ValueError, match=reason) as caught:
        sparse_to_dense(model)
    assert "\n" not in str(caught.value)
    assert visible_state(inner) == before


def test_a_compiled_model_is_driven_as_the_model_in_it(hf: Any) -> None:
    expected = generate(hf)
    assert torch.equal(fast_generate(sparse_to_dense(torch.compile(hf), DRAFT)), expected)
    hf.model.layers[0] = torch.compile(hf.model.layers[0])
    hf.forward = torch.compile(hf.forward)
    hf.compile()
    assert torch.equal(fast_generate(sparse_to_dense(hf, DRAFT)), expected)


def test_transformers_own_hooks_are_no_obstacle(hf: Any) -> None:
    hf(IDS, output_hidden_states=True)  # leaves hooks on the layers
    hf.enable_input_require_grads()
    assert torch.equal(fast_generate(sparse_to_dense(hf, DRAFT)), generate(hf))


# --------------------------------------------------------------------------- changes after wrapping


class _LoRA(nn.Module):
    """A projection with a low-rank adapter, as PEFT injects it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.lora_b = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)
        self.scaling = {"default": 1.0}
        self.disabled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.disabled:
            return self.base_layer(x)
        return self.base_layer(x) + self.scaling["default"] * self.lora_b(self.lora_a(x))


def _inject_adapter(hf: Any) -> None:
    torch.manual_seed(1)
    for layer in hf.model.layers:
        layer.self_attn.q_proj = _LoRA(layer.self_attn.q_proj)
        layer.mlp.down_proj = _LoRA(layer.mlp.down_proj)


def _adapters(hf: Any) -> Iterator[_LoRA]:
    yield from (module for module in hf.modules() if isinstance(module, _LoRA))


def _scale_adapter(hf: Any) -> None:
    for adapter in _adapters(hf):
        adapter.scaling["default"] = 8.0


def _disable_adapter(hf: Any) -> None:
    for adapter in _adapters(hf):
        adapter.disabled = True


def _replace_head(hf: Any) -> None:
    torch.manual_seed(2)
    hf.lm_head = nn.Linear(hf.lm_head.in_features, hf.lm_head.out_features, bias=False)


def _replace_a_weight(hf: Any) -> None:
    weight = hf.model.layers[0].mlp.up_proj.weight
    hf.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight.detach().flip(0))


def _write_in_place(hf: Any) -> None:
    with torch.no_grad():
        hf.model.layers[0].mlp.up_proj.weight.mul_(-1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda hf: hf.to(torch.bfloat16),
    "float64": lambda hf: hf.double(),
    "a replaced head": _replace_head,
    "a replaced weight": _replace_a_weight,
    "a weight written in place": _write_in_place,
    "fewer layers": lambda hf: hf.model.layers.pop(2),
    "a larger vocabulary": lambda hf: hf.resize_token_embeddings(hf.config.vocab_size + 3),
    "another factor of the scores": lambda hf: setattr(
        hf.model.layers[0].self_attn, "scaling", 2.0
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_shows(hf: Any, change: str) -> None:
    fast = sparse_to_dense(hf, DRAFT)
    before = fast_generate(fast)
    CHANGES[change](hf)
    assert torch.equal(fast_generate(fast), generate(hf))
    if change not in ("float64", "a larger vocabulary"):
        assert not torch.equal(fast_generate(fast), before)


def test_adapters_come_are_scaled_are_switched_off_and_go(hf: Any) -> None:
    plain = generate(hf)
    original = copy.copy(hf.model.layers[0].self_attn._modules)
    fast = sparse_to_dense(hf, DRAFT)
    texts = [fast_generate(fast)]
    for change in (_inject_adapter, _scale_adapter, _disable_adapter):
        change(hf)
        texts.append(fast_generate(fast))
        assert torch.equal(texts[-1], generate(hf))
    assert len({tuple(ids[0].tolist()) for ids in texts}) == 3
    assert torch.equal(texts[0], plain) and torch.equal(texts[3], plain)
    hf.model.layers[0].self_attn.q_proj = original["q_proj"]
    assert torch.equal(fast_generate(fast), plain)


def test_an_unchanged_model_is_not_attached_again(hf: Any) -> None:
    fast = sparse_to_dense(hf, DRAFT)
    engine = fast._engine
    fast_generate(fast)
    generate(hf)
    hf(IDS, output_hidden_states=True)
    hf.train()
    hf.set_attn_implementation("eager")
    fast_generate(fast)
    assert fast._engine is engine


def test_hooks_and_autocast_are_refused_while_they_last(hf: Any) -> None:
    fast = sparse_to_dense(hf, DRAFT)
    expected = fast_generate(fast)
    handle = hf.model.layers[0].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(ValueError, match=r"forward hook .*'model.layers.0'"):
        fast_generate(fast)
    handle.remove()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"torch\.autocast"),
    ):
        fast_generate(fast)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match="global forward hooks"):
        fast_generate(fast)
    handle.remove()
    assert torch.equal(fast_generate(fast), expected)


def test_a_change_into_an_unsupported_model_is_refused_until_it_is_undone(hf: Any) -> None:
    fast = sparse_to_dense(hf, DRAFT)
    expected = fast_generate(fast)
    layers = hf.model.layers
    hf.model.layers = nn.ModuleList([*layers, layers[0]])
    for _ in range(2):
        with pytest.raises(ValueError, match="exactly once"):
            fast_generate(fast)
    hf.model.layers = layers
    assert torch.equal(fast_generate(fast), expected)
