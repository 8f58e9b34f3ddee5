"""The suite `acceptance` at a small size, and its measurements against plain definitions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jobs import benchmark
from jobs.suites.acceptance import suite
from jobs.suites.acceptance.perplexity import perplexity
from jobs.suites.shared import activations
from jobs.suites.shared.workload import Workload, build_workload
from pipeline.records import UsageError
from std_core.engine.engine import Engine
from std_core.model.drafters import projections
from std_core.types import Draft

SELECTING_POLICIES = ("std", "snapkv", "specvlm", "random", "window")
DRAFTS = {
    *SELECTING_POLICIES,
    "specvlm_stage1",
    "refresh_1",
    "refresh_2",
    "layerskip",
    "teal",
    "composition",
    "int8",
    "int4",
}
Rows = dict[tuple[str, float, int], dict[str, Any]]


@pytest.fixture(scope="module", params=["llama", "demo"])
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    words = ["--context", "200", "--prompts", "2", "--tokens", "12", "--threads", "1"]
    return suite.run(["--model", request.param, *words])


@pytest.fixture
def rows(figures: dict[str, Any]) -> Rows:
    return {(row["draft"], row["budget"], row["gamma"]): row for row in figures["rows"]}


def test_rows_of_every_draft(figures: dict[str, Any], rows: Rows) -> None:
    assert {row["draft"] for row in figures["rows"]} == DRAFTS | {"ngram"}
    assert len(rows) == len(figures["rows"])  # none twice
    assert {gamma for draft, budget, gamma in rows if (draft, budget) == ("std", 0.2)} == {2, 5, 9}
    for row in rows.values():
        assert row["context"] >= 200 and 0 <= row["alpha"] <= 1
        assert 0 <= row["accepted_per_round"] <= row["gamma"]
        assert row["identical"] == row["requests"], row


def test_a_draft_that_keeps_all_entries_is_always_accepted(rows: Rows) -> None:
    row = rows["std", 1.0, 5]
    assert row["alpha"] == 1.0 and row["kv_entries"] == pytest.approx(row["context"], abs=0.1)


def test_policies_read_equally_many_entries_at_equal_budgets(rows: Rows) -> None:
    for keep in suite.KEEPS:
        assert len({rows[draft, keep, 5]["kv_entries"] for draft in SELECTING_POLICIES}) == 1
    for draft in SELECTING_POLICIES:
        entries = [rows[draft, keep, 5]["kv_entries"] for keep in suite.KEEPS]
        assert all(less < more for less, more in itertools.pairwise(entries))
        assert entries[-1] < rows["std", 1.0, 5]["kv_entries"]
    assert rows["specvlm_stage1", 0.1, 5]["kv_entries"] == rows["std", 0.1, 5]["kv_entries"]
    assert rows["refresh_1", 0.2, 5]["kv_entries"] == rows["std", 0.2, 5]["kv_entries"]


def test_cheaper_drafts_read_fewer_bytes(rows: Rows) -> None:
    whole = rows["std", 1.0, 5]
    skipped = rows["layerskip", 1.0, 5]
    weights = {
        name: rows[name, 1.0, 5]["weight_bytes"] for name in ("int4", "int8", "teal", "layerskip")
    }
    assert 0 < weights["int4"] < weights["int8"] < weights["teal"] < whole["weight_bytes"]
    assert (
        weights["layerskip"] < whole["weight_bytes"] and skipped["kv_entries"] < whole["kv_entries"]
    )
    assert rows["composition", 0.3, 5]["weight_bytes"] == weights["teal"]
    assert (rows["ngram", 0.0, 5]["weight_bytes"], rows["ngram", 0.0, 5]["kv_entries"]) == (0, 0)


def test_larger_batches_activate_more_weights(figures: dict[str, Any]) -> None:
    shares = [figures["u"][str(count)] for count in suite.BATCHES]
    assert shares[0] == pytest.approx(0.5, abs=0.03)
    assert all(less < more for less, more in itertools.pairwise(shares)) and shares[-1] <= 1
    assert 0.3 < figures["teal_keep"] < 0.7


def test_the_chosen_nucleus_has_the_highest_acceptance(figures: dict[str, Any]) -> None:
    assert figures["nuclei"][str(figures["nucleus"])] == max(figures["nuclei"].values())
    assert set(figures["nuclei"]) == {str(share) for share in suite.NUCLEI}


def test_perplexity_is_measured_on_prose_only(figures: dict[str, Any]) -> None:
    assert bool(figures["perplexity"]) == (figures["model"] == "llama")
    assert all(value > 1 for value in figures["perplexity"].values())


@pytest.fixture(scope="module")
def prose(families: Callable[[str], Path]) -> tuple[Engine, Workload]:
    """A tiny text model, and two prompts with continuations of 33 tokens."""
    engine = Engine.load(str(families("llama")), max_num_seqs=2, keep_prefixes=True)
    return engine, build_workload(engine.checkpoint, 200, range(2), 2, continuation=33)


def test_dense_perplexity_is_that_of_the_plain_model(prose: tuple[Engine, Workload]) -> None:
    engine, workload = prose
    losses = []
    with torch.inference_mode():
        for request in workload.requests:
            text = workload.continuations[request.request_id]
            prompt = workload.inputs[request.request_id].ids
            ids = torch.cat([prompt, torch.tensor([text])], dim=1)
            logits = engine.model.hf(ids).logits[0, -len(text) : -1]
            losses.append(F.cross_entropy(logits, torch.tensor(text[1:])))
    expected = float(torch.stack(losses).mean().exp())
    assert perplexity(engine, workload, Draft("full")) == pytest.approx(expected, rel=1e-3)
    all_entries = perplexity(engine, workload, Draft("std", keep=1.0))
    assert all_entries == pytest.approx(expected, rel=1e-3)
    window = perplexity(engine, workload, Draft("window", keep=0.1))
    assert window != pytest.approx(expected, rel=1e-3)


def test_joint_shares_of_sequences_without_common_channels_add_up(
    prose: tuple[Engine, Workload],
) -> None:
    engine, _ = prose
    recorded = {}
    for name, linear in projections(engine.model.decoder):
        sequence_of_channel = torch.arange(linear.in_features) // (linear.in_features // 8)
        active = (sequence_of_channel == torch.arange(8)[:, None]).float()
        recorded[name] = active.expand(4, -1, -1)
    thresholds = dict.fromkeys(recorded, 0.5)
    shares = activations.joint_weight_shares(engine, recorded, thresholds, (1, 2, 8))
    assert shares == {"1": 0.125, "2": 0.25, "8": 1.0}


def test_the_suite_prints_a_table_and_ends_with_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [("std", Draft("std")), ("teal", Draft("full", channels=0.5))]
    monkeypatch.setattr(suite, "drafts", lambda nucleus: iter(two))
    words = ["--context", "200", "--prompts", "1", "--tokens", "4", "--threads", "1"]
    assert benchmark.main(["--suite", "acceptance", "--model", "llama", *words]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out.splitlines()[-1])
    assert [row["draft"] for row in figures["rows"]] == ["std", "teal"]
    assert "acceptance of llama" in captured.err and "kv_entries" in captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context", "20"], "--context is 20: at least 128"),
        (["--prompts", "0"], "--prompts is 0: at least 1"),
        (["--model", "nobody"], "'nobody' is not a preset"),
        (["--model", "llama", "--prompts", "20", "--context", "100000"], "tokens of prose"),
    ],
)
def test_flags_that_cannot_be_measured_are_errors(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        suite.run(argv)
