"""The engine behind the signature of `generate`.

For notebooks, and for code that has loaded a Hugging Face model itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from std_core.decoding.token_sampling import ResolvedSampling
from std_core.engine.engine import Engine, check_settings
from std_core.engine.row import Row
from std_core.generation_arguments import Call, GenerationArguments
from std_core.model.checkpoint import ModelInputs
from std_core.model.model import Model
from std_core.model.model_state import ModelState, unfaithful_reason
from std_core.model.module_view import uncompiled
from std_core.model.positions import PositionRule, reference_positions, transformers_positions
from std_core.processor_rows import split_rows
from std_core.step_replay import StepReplay, step_scores
from std_core.types import Draft, Request, Result, Sampling

logger = logging.getLogger(__name__)


def sparse_to_dense(
    model: Any,
    draft: Draft | None = None,
    positions: PositionRule = "transformers",
    **settings: int,
) -> SparseToDense:
    """Wrap a loaded model in a faster `generate` that returns the same tokens.

    Args:
        model: any supported Hugging Face Video-LLM or text model. Its own `generate` keeps working.
        draft: how tokens are drafted; if not given, from the top K entries by the question's
            attention (Sparse-to-Dense §3.2).
        positions: where the text behind a video continues. The default gives the tokens of the
            installed transformers' `generate`; `reference` the positions that Qwen2-VL and
            Qwen2.5-VL were trained with, and the tokens of vLLM (`std_core.model.positions`). Where
            they differ, a warning is logged once.
        settings: fields of `Engine`: `max_num_seqs`, `prefill_chunk`, `strict`.

    Raises:
        ValueError: the model's architecture is not supported, or a setting is unknown or out of
            range.
    """
    return SparseToDense(model, draft or Draft(), positions, **settings)


class SparseToDense:
    """See `sparse_to_dense`.

    Calls from several threads are answered one after the other. The model may change between calls
    (weights, adapters, dtype, device, heads): the engine is then built again.
    """

    def __init__(self, hf: Any, draft: Draft, positions: PositionRule, **settings: int):
        check_settings(**settings)  # before the model is touched
        self.hf = uncompiled(hf)
        self.draft = draft
        self.positions = positions
        self._settings = settings
        self._reported = set[str]()
        self._warns_of_positions = positions == "transformers"
        self._lock = threading.RLock()
        self._last_call = threading.local()
        self._attach()

    def _attach(self) -> None:
        """Build the engine for the model as it is now."""
        state = ModelState(self.hf)
        model = Model(self.hf, position_rule=self.positions)
        window = int(self.hf.config.get_text_config().max_position_embeddings)
        checkpoint: Any = _NoCheckpoint(window)
        settings: Any = self._settings
        self._engine = Engine(model, checkpoint, **settings)
        self._state = state

    def _follow_model(self) -> None:
        """Build the engine again if the model has changed since.

        Raises:
            ValueError: the engine cannot do what the model now does.
        """
        if reason := unfaithful_reason(self.hf):
            raise ValueError(f"the model {reason}")
        with self._lock:
            if ModelState(self.hf) != self._state:
                self._attach()

    @property
    def results(self) -> list[Result]:
        """Results of this thread's last call, one per row: rounds, drafted and accepted tokens,
        share of the KV entries that the draft read, times.
        """
        return getattr(self._last_call, "results", [])

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what `model.generate` returns for the same arguments.

        Arguments are read by transformers' own functions: the model's generation configuration,
        `generation_config` and keywords are merged as there. What has no equivalent is refused by
        name (`generation_arguments.py` has the lists). tests/README.md lists the calls that were
        compared.

        Args:
            inputs: (B, n) token ids; also as `input_ids`.
            logits_processor: those of transformers' that depend on a row's ids and scores alone,
                and classes with the attribute `is_pure = True`, are applied to drafts as well. For
                any other the call is handed to the model's own `generate`, and the log says so.
            prefix_allowed_tokens_fn: handed to the model's own `generate` as well.
            stopping_criteria, streamer: called once per step with the whole batch, as soon as all
                rows have the step's token; text arrives in bursts of a round.
            seed: row i of the output has seed `seed` + i, and its text is reproducible. Without one
                `torch.manual_seed` governs sampling; the draws are others than `generate`'s.
            kwargs: fields of `GenerationConfig`, and a processor's outputs as one batch
                (`input_ids`, `attention_mask`, `pixel_values_videos`, `video_grid_thw`,
                `mm_token_type_ids`, …). Masked positions are skipped, on either side.

        Returns:
            (B × num_return_sequences, n + longest output), prompts included; shorter rows are
            padded on the right. With `return_dict_in_generate` an object with these `sequences`,
            and `scores` and `logits` as requested: zeros in rows that have ended; no `cache`.

        Raises:
            ValueError: an argument is not supported, or transformers refuses it; or prompt and
                output do not fit the model's window. Or the model has hooks, is under autocast, or
                was changed into one that is not supported.
            RequestError: the model cannot answer a row.
        """
        call = Call(
            inputs,
            generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            streamer=streamer,
            tokenizer=tokenizer,
            options=kwargs,
        )
        arguments = GenerationArguments.parse(self.hf, call)
        if reason := self._cannot_draft_reason(call, arguments):
            return self._generate_densely(call, reason, seed)
        self._follow_model()
        rows = list(
            split_rows(
                self.hf.config,
                arguments.input_ids,
                arguments.attention_mask,
                arguments.visual_inputs,
            )
        )
        self._check_window(rows, arguments.max_new_tokens)
        self._warn_of_positions(rows)
        results = self._run(rows, arguments, seed)
        self._last_call.results = results
        return _output(arguments, results)

    def _check_window(self, rows: list[ModelInputs], max_tokens: int) -> None:
        window = self._engine.checkpoint.max_model_len
        longest = max(row.ids.shape[1] for row in rows)
        if longest + max_tokens > window:
            raise ValueError(
                f"{longest} tokens of prompt and max_new_tokens = {max_tokens}: the window holds"
                f" {window}"
            )

    def _warn_of_positions(self, rows: list[ModelInputs]) -> None:
        """Log once that transformers' positions are not those that the model was trained with."""
        mrope = self._engine.model.mrope
        for inputs in rows:
            if not self._warns_of_positions or mrope is None or not len(inputs.visual_positions):
                continue
            reference = reference_positions(inputs, mrope)
            if torch.equal(reference, transformers_positions(self.hf, inputs).cpu()):
                continue
            self._warns_of_positions = False
            logger.warning(
                "transformers %s places the text behind a video at other positions than the model"
                " was trained with; its generate and this one answer worse than the model can:"
                ' sparse_to_dense(model, positions="reference") uses the right ones',
                transformers.__version__,
            )

    def _cannot_draft_reason(self, call: Call, arguments: GenerationArguments) -> str | None:
        if call.prefix_allowed_tokens_fn is not None:
            return "prefix_allowed_tokens_fn"
        processor = arguments.stateful_processor()
        return None if processor is None else f"the logits processor {type(processor).__name__}"

    def _generate_densely(self, call: Call, reason: str, seed: int | None) -> Any:
        """Hand a call to the model's own `generate`."""
        if seed is not None:
            raise ValueError(
                f"seed = {seed} with {reason}: such a call is handed to the model's own generate,"
                " which takes no seed"
            )
        if self.positions == "reference" and self._engine.model.mrope is not None:
            raise ValueError(
                f'positions = "reference" with {reason}: such a call is handed to the model\'s own'
                " generate, which has transformers' positions"
            )
        if reason not in self._reported:
            self._reported.add(reason)
            logger.warning(
                "%s may depend on the order of its calls: decoding densely, by the model's own"
                " generate",
                reason,
            )
        self._last_call.results = []
        return call.run(self.hf)

    def _run(
        self, rows: list[ModelInputs], arguments: GenerationArguments, seed: int | None
    ) -> list[Result]:
        """Results in the order of the output's rows."""
        copies = arguments.copies
        requests = [
            Request(
                str(number),
                "",
                # rows of one prompt share its prefix
                video_id=str(number // copies) if copies > 1 else "",
                sampling=Sampling(
                    arguments.max_new_tokens, seed=None if seed is None else seed + number
                ),
            )
            for number in range(len(rows) * copies)
        ]

        def prepare(request: Request) -> ModelInputs:
            return rows[int(request.request_id) // copies]

        def resolve(request: Request, prompt: torch.Tensor) -> ResolvedSampling:
            row = int(request.request_id) // copies
            return arguments.row_sampling(row, request.sampling.seed)

        replay = _replay_of(arguments) if arguments.watches_steps else None

        def end_check(row: Row) -> int | None:
            return None if replay is None else replay.advance(int(row.request.request_id), row)

        results = {}
        with self._lock:  # the engine's slots, counters and drafts serve one run at a time
            for result in self._engine.run(
                requests, self.draft, prepare, resolve=resolve, end_check=end_check
            ):
                results[result.request_id] = result
        for result in results.values():
            if result.error is not None:
                raise result.error
        if replay is not None:
            replay.finish()
        in_order = [results[request.request_id] for request in requests]
        return in_order if replay is None else replay.cut(in_order)


def _replay_of(arguments: GenerationArguments) -> StepReplay:
    config = arguments.config
    return StepReplay(
        arguments.input_ids.repeat_interleave(arguments.copies, dim=0),
        arguments.criteria,
        arguments.streamer,
        arguments.pad_token_id,
        returns_scores=bool(config.return_dict_in_generate and config.output_scores),
    )


def _output(arguments: GenerationArguments, results: list[Result]) -> Any:
    """What `generate` returns."""
    prompts = arguments.input_ids.repeat_interleave(arguments.copies, dim=0)
    steps = max(len(result.token_ids) for result in results)
    padding = [arguments.pad_token_id] * steps
    outputs = [(result.token_ids + padding)[:steps] for result in results]
    sequences: Any = torch.cat([prompts, torch.tensor(outputs, device=prompts.device)], dim=1)
    config = arguments.config
    if not config.return_dict_in_generate:
        return sequences
    output = GenerateDecoderOnlyOutput(sequences=sequences)
    if config.output_scores:
        rows = [result.scores for result in results]
        output["scores"] = tuple(step_scores(rows, step) for step in range(steps))
    if config.output_logits:
        rows = [result.logits for result in results]
        output["logits"] = tuple(step_scores(rows, step) for step in range(steps))
    return output


@dataclass(frozen=True)
class _NoCheckpoint:
    """Stands in for a checkpoint: prompts and outputs are token ids, not text."""

    max_model_len: int

    def decode(self, ids: list[int]) -> str:
        return ""
