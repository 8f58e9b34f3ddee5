"""What a draft reads of a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from std_core.engine.engine import Engine
from std_core.engine.prefill import advance
from std_core.engine.row import Row
from std_core.types import Draft, Request, Sampling


def test_rounds_between_two_chunks_do_not_change_a_second_models_prefill(
    engine: Engine, requests: list[Request], tiny_model: Path
) -> None:
    def second_models_keys(rounds_between_chunks: bool) -> torch.Tensor:
        """Of a row that is prefilled in small chunks while another row is running."""
        draft = Draft("std", keep=1.0, gamma=2, model=str(tiny_model))
        batch = replace(engine, prefill_chunk=7).new_batch(draft)
        for request in requests[:2]:
            slot = batch._free_slot()
            admission = batch.prefill.admit(replace(request, sampling=Sampling(200)), slot)
            while (row := advance(admission)) is None:
                if rounds_between_chunks and slot:
                    list(batch._round())
            assert isinstance(row, Row)
            batch.rows[slot] = row
            batch.update_slots()
        assert batch.rows[0] is not None
        # the row's first draft step writes the last entry again
        entries = int(batch.slots.draft_length[1]) - 1
        return batch.slots.draft.key[2][1, :, :entries].clone()

    with torch.inference_mode():
        torch.testing.assert_close(second_models_keys(True), second_models_keys(False))
