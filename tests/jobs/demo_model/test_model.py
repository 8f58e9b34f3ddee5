"""The shipped demo model, on held-out clips that went through H.264 and the frames stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs import benchmark
from jobs.demo_model import world
from jobs.suites.shared import reference
from pipeline.config import ROOT
from pipeline.records import FrameOptions
from pipeline.video.frame_plan import plan_frames
from pipeline.video.frames import decode
from pipeline.video.probe import probe
from std_core.engine.engine import Engine
from std_core.types import Draft, Request, Sampling

MODEL = ROOT / "conf" / "model" / "demo"


def test_drafted_and_dense_tokens_are_those_of_generate(tmp_path: Path) -> None:
    engine = Engine.load(str(MODEL), max_num_seqs=8)
    requests = []
    for seed in range(10):
        path = tmp_path / f"{seed}.mp4"
        path.write_bytes(world.make_clip(900_000 + seed, 1 + seed % 8)[1])
        info = probe(str(path))
        frames = decode(
            str(path), info, plan_frames(info, FrameOptions(), engine.checkpoint.geometry)
        )
        pixels = torch.from_numpy(frames.pixels)
        requests.append(
            Request(path.name, world.CAPTION_PROMPTS[0], pixels, sampling=Sampling(256))
        )
    inputs = engine.checkpoint.preprocess
    expected = {
        r.request_id: reference.generate(engine.model, inputs(r), r.sampling) for r in requests
    }
    for draft in (Draft("std"), Draft("random"), None):
        results = list(engine.run(requests, draft))
        assert {r.request_id: r.token_ids for r in results} == expected
        assert all(r.finish_reason == "stop" for r in results)


def test_accuracy_on_a_few_clips_is_far_above_chance(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of more clips are in jobs/suites/README.md; by chance a clause is right once in
    300."""
    assert benchmark.main(["--suite", "demo_quality", "--seed", "5", "--clips", "6"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["clips"] == 6
    assert figures["caption_clause_accuracy"] > 0.75
    assert figures["answer_accuracy"] > 0.75
    assert set(figures["by_scenes"]) <= {str(n) for n in range(1, 9)}


def test_the_small_model_has_the_same_tokenizer_and_most_clauses_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = MODEL.with_name("demo_small")
    assert (small / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert Engine.load(str(small)).model.hf.num_parameters() <= 800_000
    argv = "--suite demo_quality --seed 5 --clips 4 --model demo_small --mode dense"
    assert benchmark.main(argv.split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["caption_clause_accuracy"] > 0.75


def test_the_shipped_models_take_less_than_16_mib() -> None:
    assert sum(p.stat().st_size for p in (ROOT / "conf" / "model").rglob("*")) < 16 << 20
