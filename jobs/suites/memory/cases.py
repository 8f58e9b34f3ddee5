"""The cases of the suite `memory`: in each, one term of a plan's memory is most of the total."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from jobs.suites.memory.meter import weight_bytes
from jobs.suites.memory.requests import TOKENS, ModelSpec, RequestSize, random_inputs
from jobs.suites.shared.random_models import (
    TextSize,
    TokenIdCheckpoint,
    VisionSize,
    config_of,
    random_model,
)
from jobs.suites.shared.workload import raise_errors
from std_core.cost_model.memory import LongestRequest, memory_breakdown
from std_core.cost_model.model_size import ModelSize
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs, full_model_size
from std_core.model.drafters import pair_drafter
from std_core.model.model import Model
from std_core.types import Draft, Request, Sampling

SECOND_MODEL = "pair"  # stands for a second model's folder
WINDOW = 1 << 20  # tokens
HEAD_DIM = 64
VISION_HEAD_DIM = 32


@dataclass(frozen=True)
class Case:
    """A model, a draft, and as many of one request as there are slots.

    Args:
        chunk: tokens of a prompt that are prefilled at once.
        seed: of sampling; None is greedy.
    """

    name: str
    model: ModelSpec
    request: RequestSize
    slots: int = 1
    draft: Draft | None = None
    second_model: ModelSpec | None = None
    dtype: str = "float32"
    chunk: int = 256
    seed: int | None = None
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def longest(self) -> LongestRequest:
        """The request as a plan sees it."""
        visual = self.request.visual_tokens(self.model)
        return LongestRequest(
            visual + self.request.text,
            visual=visual,
            max_tokens=self.request.max_tokens,
            chunk=self.chunk,
            sampling="greedy" if self.seed is None else "seeded",
        )

    def size_of(self, model: ModelSpec) -> ModelSize:
        item_bytes = self.torch_dtype.itemsize
        return full_model_size(_config(model), item_bytes, item_bytes)

    def memory_breakdown(self) -> dict[str, float]:
        """Bytes by term, as a plan predicts them."""
        second = self.size_of(self.second_model) if self.second_model else None
        return memory_breakdown(
            self.size_of(self.model),
            self.longest,
            self.slots,
            self.draft,
            second,
            device_kind=self.device,
        )


class CaseRun:
    """A case's model and prompts; each run uses an engine of its own."""

    def __init__(self, case: Case, prompts: dict[str, ModelInputs]):
        self.case = case
        self.prompts = prompts
        self.model = self._random_model(case.model)
        self.second = self._random_model(case.second_model) if case.second_model else None

    @classmethod
    def of(cls, case: Case) -> CaseRun:
        return cls(case, case_prompts(case))

    def _random_model(self, spec: ModelSpec) -> Model:
        case = self.case
        return Model(
            random_model(_config(spec), dtype=case.torch_dtype, device=case.device),
            owns_weights=True,
        )

    @property
    def weights(self) -> int:
        """Bytes of the models' weights."""
        second = [self.second.hf] if self.second else []
        return weight_bytes([self.model.hf, *second])

    def run(self) -> None:
        """Run the request of every slot to its end."""
        case = self.case
        checkpoint = TokenIdCheckpoint(WINDOW)
        engine = Engine(self.model, checkpoint, case.slots, case.chunk)  # type: ignore[arg-type]
        if self.second is not None and case.draft is not None:
            engine.draft_models.put(case.draft, pair_drafter(self.model, self.second))
        for _ in raise_errors(engine.run(self._requests(), case.draft, self._prepare)):
            pass

    def _requests(self) -> Iterator[Request]:
        tokens = self.case.request.max_tokens
        options: dict[str, Any] = {"temperature": 0.0}
        if self.case.seed is not None:
            options = {"temperature": 1.0, "top_p": 0.9, "seed": self.case.seed}
        sampling = Sampling(tokens, min_tokens=tokens, **options)
        for name in self.prompts:
            yield Request(name, "", video_id=name, sampling=sampling)

    def _prepare(self, request: Request) -> ModelInputs:
        return self.prompts[request.request_id]


def case_prompts(case: Case) -> dict[str, ModelInputs]:
    """One prompt per slot, by name. They belong to the caller and are not part of the engine's
    memory."""
    return {str(slot): random_inputs(case.model, case.request, slot) for slot in range(case.slots)}


def _config(model: ModelSpec) -> Any:
    return config_of(model.family, model.text, model.vision, TOKENS)


# -------------------------------------------------------------------------------------------- cases


def cases(scale: int = 2) -> list[Case]:
    """All cases, with sizes in proportion to `scale`: 1 in tests, more for figures."""
    float32 = [
        *_weight_cases(scale),
        *_cache_cases(scale),
        *_draft_weight_cases(scale),
        *_temporary_cases(scale),
        *_vision_cases(scale),
    ]
    without_bfloat16 = ("kv_text", "draft_kv_text", "weights")
    bfloat16 = [
        replace(case, name=f"{case.name}_bf16", dtype="bfloat16")
        for case in float32
        if case.name not in without_bfloat16
    ]
    float16 = [
        replace(case, name="logits_f16", dtype="float16")
        for case in float32
        if case.name == "logits"
    ]
    return [*float32, *bfloat16, *float16]


SHORT = RequestSize(frames=4, text=40, max_tokens=4)
STD = Draft("std", keep=0.5, gamma=5)


def _weight_cases(scale: int) -> list[Case]:
    tied = _model(_wide_text(scale, layers=4, vocabulary=8000 * scale, tied=True))
    return [
        Case("weights", _model(_wide_text(scale, layers=6)), SHORT),
        Case("weights_tied", tied, SHORT),
    ]


def _cache_cases(scale: int) -> list[Case]:
    video = _video_request(scale)
    slots = 4 * scale
    most = replace(STD, keep=0.9)
    return [
        Case("kv", _model(), video, slots=slots),
        Case(
            "kv_text",
            _text_model(),
            RequestSize(0, 1000 * scale, 90 * scale),
            slots=slots,
        ),
        Case("draft_kv", _model(), video, slots=slots, draft=most),
        Case(
            "draft_kv_text",
            _text_model(),
            RequestSize(0, 1500 * scale, 40),
            slots=slots,
            draft=STD,
        ),
    ]


def _draft_weight_cases(scale: int) -> list[Case]:
    model = _model(_wide_text(scale, layers=6))
    short_video = replace(_video_request(scale), frames=32)
    return [
        Case("int8", model, SHORT, draft=Draft("full", weights="int8")),
        Case("int4", model, SHORT, draft=Draft("full", weights="int4")),
        Case("teal", model, SHORT, draft=Draft("full", channels=0.5)),
        Case(
            "pair",
            _model(),
            short_video,
            slots=2 * scale,
            draft=Draft("specvlm", model=SECOND_MODEL),
            second_model=_model(_wide_text(scale)),
        ),
    ]


def _temporary_cases(scale: int) -> list[Case]:
    """Temporaries of prefill, attention mass, logits, sampling, a round and a refresh."""
    large_vocabulary = _model(_text(vocabulary=16000 * scale, layers=1))
    return [
        Case(
            "prefill",
            _model(_text(intermediate=4096 * scale, layers=1)),
            RequestSize(64 * scale, 1000, 4),
            chunk=1024,
        ),
        Case(
            "mass",
            _model(_text(hidden=1024, layers=1, heads=16, kv_heads=2)),
            RequestSize(128 * scale, 300, 4),
            draft=STD,
            chunk=512,
        ),
        Case(
            "logits",
            large_vocabulary,
            replace(SHORT, max_tokens=12),
            slots=4 * scale,
            draft=Draft("full", gamma=10),
        ),
        Case(
            "sampled",
            large_vocabulary,
            replace(SHORT, max_tokens=8),
            slots=4 * scale,
            draft=Draft("full", gamma=5),
            seed=3,
        ),
        Case(
            "round",
            _model(_text(intermediate=16384, layers=1)),
            replace(SHORT, max_tokens=12),
            slots=12 * scale,
            draft=Draft("full", gamma=10),
        ),
        Case(
            "refresh",
            _model(_text(hidden=1024, layers=1, heads=16, kv_heads=4)),
            _video_request(scale),
            slots=4 * scale,
            draft=replace(STD, refresh=1),
        ),
    ]


def _vision_cases(scale: int) -> list[Case]:
    request = RequestSize(32 * scale, 64 + 32 * scale, 4)
    text = _text(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=2)
    found = []
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"):
        vision = _vision(hidden=256, intermediate=1024, blocks=3, image=224)
        found.append(Case(f"vision_{family}", ModelSpec(family, text, vision, frame=224), request))
    return found


def _video_request(scale: int) -> RequestSize:
    return RequestSize(frames=128 * scale, text=64, max_tokens=16)


def _model(text: TextSize | None = None) -> ModelSpec:
    """A Qwen2-VL with a small vision tower."""
    vision = _vision(hidden=64, intermediate=128, blocks=2)
    return ModelSpec("qwen2_vl", text or _text(), vision)


def _text_model() -> ModelSpec:
    return ModelSpec("llama", _text())


def _text(
    hidden: int = 256,
    intermediate: int = 512,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 512,
    tied: bool = False,
) -> TextSize:
    return TextSize(
        hidden,
        intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        head_dim=HEAD_DIM,
        window=WINDOW,
        tied=tied,
    )


def _wide_text(scale: int, layers: int = 4, vocabulary: int = 512, tied: bool = False) -> TextSize:
    return _text(
        hidden=256 * scale,
        intermediate=2048 * scale,
        layers=layers,
        heads=4 * scale,
        kv_heads=2,
        vocabulary=vocabulary,
        tied=tied,
    )


def _vision(hidden: int, intermediate: int, blocks: int, image: int = 112) -> VisionSize:
    return VisionSize(
        hidden, intermediate, blocks=blocks, heads=hidden // VISION_HEAD_DIM, image=image
    )
