"""The cases of the suite `memory`: in each of them one term of a plan's memory is most of the
whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from jobs.suites.decode.shapes import Shaped
from jobs.suites.memory.meter import held_by
from jobs.suites.memory.models import Asked, Sizes, build, config_of, inputs_of
from std_core.cost_model.memory import LongestRequest, memory_breakdown
from std_core.cost_model.model_size import ModelSize
from std_core.engine.engine import Engine
from std_core.model.checkpoint import ModelInputs, full_model_size
from std_core.model.drafters import pair_drafter
from std_core.model.model import Model
from std_core.types import Draft, Request, Sampling

PAIR = "pair"  # in place of a second model's folder


@dataclass(frozen=True)
class Case:
    """A model, and as many of the longest request as there are slots."""

    name: str
    sizes: Sizes
    asked: Asked
    slots: int = 1
    draft: Draft | None = None
    pair: Sizes | None = None
    dtype: str = "float32"
    chunk: int = 256
    seed: int | None = None  # of draws; greedy without
    device: str = "cpu"

    @property
    def load(self) -> LongestRequest:
        visual = self.asked.visual(self.sizes)
        load = LongestRequest(
            visual + self.asked.text,
            visual=visual,
            max_tokens=self.asked.written,
            chunk=self.chunk,
            sampling="greedy",
        )
        return load if self.seed is None else replace(load, sampling="seeded")

    def model_size(self, sizes: Sizes) -> ModelSize:
        width = torch.finfo(getattr(torch, self.dtype)).bits // 8
        return full_model_size(config_of(sizes), width, width)

    def memory_breakdown(self) -> dict[str, float]:
        pair = self.model_size(self.pair) if self.pair else None
        return memory_breakdown(
            self.model_size(self.sizes),
            self.load,
            self.slots,
            self.draft,
            pair,
            device_kind=self.device,
        )


@dataclass
class Subject:
    """A case's model, and what it is asked, ready to run; one engine for each run."""

    case: Case
    prompts: dict[str, ModelInputs]

    @classmethod
    def of(cls, case: Case) -> Subject:
        return cls(case, prompts_of(case))

    def __post_init__(self) -> None:
        case = self.case
        dtype = getattr(torch, self.case.dtype)
        self.model = build(case.sizes, dtype, case.device)
        self.pair: Model | None = build(case.pair, dtype, case.device) if case.pair else None

    @property
    def weights(self) -> int:
        """Bytes of the models' own."""
        return held_by([self.model.hf, *([self.pair.hf] if self.pair else [])])

    def run(self) -> None:
        """Every slot's request to its end."""
        case = self.case
        engine = Engine(self.model, Shaped(1 << 20), case.slots, case.chunk)  # type: ignore[arg-type]
        if self.pair is not None and case.draft is not None:
            draft = case.draft
            key = (draft.depth, draft.channels, draft.weights, draft.model)
            engine.drafters[key] = pair_drafter(self.model, self.pair)
        for result in engine.run(self._requests(), case.draft, self._prepare):
            if result.error is not None:
                raise result.error

    def _requests(self) -> Iterator[Request]:
        count = self.case.asked.written
        heat: dict[str, Any] = {"temperature": 0.0}
        if self.case.seed is not None:
            heat = {"temperature": 1.0, "top_p": 0.9, "seed": self.case.seed}
        for name in self.prompts:
            yield Request(
                name, "", video_id=name, sampling=Sampling(count, min_tokens=count, **heat)
            )

    def _prepare(self, request: Request) -> ModelInputs:
        return self.prompts[request.request_id]


def prompts_of(case: Case) -> dict[str, ModelInputs]:
    """Of each slot's request; the host's, no part of what an engine holds."""
    return {str(n): inputs_of(case.sizes, case.asked, n) for n in range(case.slots)}


def _half(case: Case) -> Case:
    return replace(case, name=f"{case.name}_bf16", dtype="bfloat16")


def cases(scale: int = 2) -> list[Case]:
    """Sizes in proportion to `scale`: 1 for tests, larger ones for figures."""
    wide = Sizes(hidden=256 * scale, inner=2048 * scale, heads=(4 * scale, 2))
    plain = Sizes(tower=(64, 128, 2))
    video = Asked(frames=128 * scale, text=64, written=16)
    std = Draft("std", keep=0.5, gamma=5)
    found = [
        Case("weights", replace(wide, layers=6), Asked(4, 40, 4)),
        Case(
            "weights_tied", replace(wide, layers=4, words=8000 * scale, tied=True), Asked(4, 40, 4)
        ),
        Case("kv", plain, video, slots=4 * scale),
        Case(
            "kv_text",
            replace(plain, family="llama"),
            Asked(0, 1000 * scale, 90 * scale),
            slots=4 * scale,
        ),
        Case("draft_kv", sizes=plain, asked=video, slots=4 * scale, draft=replace(std, keep=0.9)),
        Case(
            "draft_kv_text",
            sizes=replace(plain, family="llama"),
            asked=Asked(0, 1500 * scale, 40),
            slots=4 * scale,
            draft=std,
        ),
        Case("int8", replace(wide, layers=6), Asked(4, 40, 4), draft=Draft("full", weights="int8")),
        Case("int4", replace(wide, layers=6), Asked(4, 40, 4), draft=Draft("full", weights="int4")),
        Case("teal", replace(wide, layers=6), Asked(4, 40, 4), draft=Draft("full", channels=0.5)),
        Case(
            "pair",
            sizes=plain,
            asked=replace(video, frames=32),
            slots=2 * scale,
            draft=Draft("specvlm", model=PAIR),
            pair=wide,
        ),
        Case(
            "prefill",
            Sizes(hidden=256, inner=4096 * scale, layers=1),
            Asked(64 * scale, 1000, 4),
            chunk=1024,
        ),
        Case(
            "mass",
            sizes=Sizes(layers=1, hidden=1024, heads=(16, 2)),
            asked=Asked(128 * scale, 300, 4),
            draft=std,
            chunk=512,
        ),
        Case(
            "logits",
            sizes=Sizes(words=16000 * scale, layers=1),
            asked=Asked(4, 40, 12),
            slots=4 * scale,
            draft=Draft("full", gamma=10),
        ),
        Case(
            "sampled",
            sizes=Sizes(words=16000 * scale, layers=1),
            asked=Asked(4, 40, 8),
            slots=4 * scale,
            draft=Draft("full", gamma=5),
            seed=3,
        ),
        Case(
            "round",
            sizes=Sizes(inner=16384, layers=1),
            asked=Asked(4, 40, 12),
            slots=12 * scale,
            draft=Draft("full", gamma=10),
        ),
        Case(
            "refresh",
            sizes=Sizes(layers=1, hidden=1024, heads=(16, 4)),
            asked=video,
            slots=4 * scale,
            draft=replace(std, refresh=1),
        ),
    ]
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"):
        sizes = Sizes(
            family, tower=(256, 1024, 3), hidden=128, heads=(2, 2), inner=256, layers=2, side=224
        )
        found.append(Case(f"vision_{family}", sizes, Asked(32 * scale, 64 + 32 * scale, 4)))
    halves = {"kv_text", "draft_kv_text", "weights"}
    return [*found, *(_half(case) for case in found if case.name not in halves)]
