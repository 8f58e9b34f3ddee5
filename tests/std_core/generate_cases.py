"""Calls of `generate` that are made both ways, by the model and by the wrapper, with the outcome.

`tests/README.md` has the same list as a table (`python -m tests.std_core.generate_cases` prints
it)."""

from __future__ import annotations

from typing import NamedTuple

SAME = "same tokens"
DENSE = "same tokens, decoded densely, by the model's own `generate`; the log says so"
BOTH_REFUSE = "both refuse, with the same sentence"


class Case(NamedTuple):
    """A call's keywords as Python source, and `SAME`, `DENSE`, `BOTH_REFUSE`, or our sentence.

    The call has `input_ids=ids, attention_mask=mask` (two rows, one padded on the left) unless it
    says `inputs` or these itself, and `max_new_tokens=12` unless it says a length.
    """

    call: str
    outcome: str


TEXT_CASES = [
    # lengths
    Case("max_new_tokens=12", SAME),
    Case("max_length=n + 7", SAME),
    Case("max_length=n", BOTH_REFUSE),
    Case("max_new_tokens=5, max_length=n + 9", SAME),
    Case("generation_config=GenerationConfig()", SAME),
    Case("generation_config=GenerationConfig(max_new_tokens=5, repetition_penalty=1.3)", SAME),
    Case("generation_config=GenerationConfig(max_new_tokens=5), max_new_tokens=9", SAME),
    Case(
        "max_new_tokens=40_000",
        "10 tokens of prompt and max_new_tokens = 40000: the window holds 32768",
    ),
    # inputs
    Case("inputs=ids, attention_mask=mask", SAME),
    Case("inputs=ids, input_ids=ids", BOTH_REFUSE),
    Case("input_ids=ids", SAME),
    Case("input_ids=ids, attention_mask=None, pad_token_id=2", SAME),
    Case("inputs=None, bos_token_id=5", SAME),
    Case("inputs=None", BOTH_REFUSE),
    Case("max_newtokens=5", BOTH_REFUSE),
    Case("inputs_embeds=embeds", "inputs_embeds is given: prompts are token ids"),
    Case("position_ids=mask", "position_ids is given: positions are computed from the prompt"),
    Case("cache=object()", "cache is given: every call prefills its whole prompt"),
    Case(
        "past_key_values=object()", "past_key_values is given: every call prefills its whole prompt"
    ),
    # what changes nothing
    Case("num_beams=1", SAME),
    Case("use_cache=True", SAME),
    Case("use_cache=False", SAME),
    Case("streamer=None", SAME),
    Case("assistant_model=None", SAME),
    Case("synced_gpus=False", SAME),
    Case("num_return_sequences=1", SAME),
    Case("early_stopping=True, length_penalty=2.0", SAME),
    Case("num_assistant_tokens=3", SAME),
    Case("cache_implementation='static'", SAME),
    Case("output_attentions=True", SAME),
    Case("guidance_scale=1.0", SAME),
    Case("dola_layers=None", SAME),
    # ends
    Case("eos_token_id=stop", SAME),
    Case("eos_token_id=[stop, 7]", SAME),
    Case("eos_token_id=None", SAME),
    Case("eos_token_id=stop, pad_token_id=5", SAME),
    Case("eos_token_id=stop, min_new_tokens=10", SAME),
    Case("eos_token_id=[stop, 50_000], min_new_tokens=10", SAME),
    Case("eos_token_id=50_000, min_new_tokens=10", SAME),
    Case("eos_token_id=stop, min_length=n + 10", SAME),
    Case(
        "generation_config=GenerationConfig(max_new_tokens=12, eos_token_id=stop,"
        " min_new_tokens=10), min_new_tokens=0",
        SAME,
    ),
    Case("stop_strings=[text], tokenizer=tokenizer", SAME),
    Case("stop_strings=text", BOTH_REFUSE),
    Case("max_time=0.0", SAME),
    Case("max_time=1e6", SAME),
    Case("stopping_criteria=[EndsAfterTokens(4)]", SAME),
    Case("stopping_criteria=[EndsAfterTokens(4)], eos_token_id=None", SAME),
    Case("stopping_criteria=[EndsAfterTokens(4)], eos_token_id=stop", SAME),
    Case("stopping_criteria=[EndsRowByRow()]", SAME),
    Case("stopping_criteria=[EndsRowByRow()], eos_token_id=None", SAME),
    Case(
        "stopping_criteria=[EndsByScore()], return_dict_in_generate=True, output_scores=True", SAME
    ),
    Case("stopping_criteria=[MaxLengthCriteria(n + 5)]", SAME),
    Case("stopping_criteria=[MaxLengthCriteria(n + 15)]", SAME),
    Case("stopping_criteria=[EosTokenCriteria(stop)]", SAME),
    Case("stopping_criteria=[MaxTimeCriteria(0.0)]", SAME),
    Case("streamer=Recorder()", SAME),
    Case("streamer=Recorder(), eos_token_id=stop", SAME),
    Case("streamer=TextStreamer(tokenizer)", BOTH_REFUSE),
    # sampling
    Case("temperature=0.5", SAME),
    Case("do_sample=False, temperature=0.5, top_k=3, top_p=0.5", SAME),
    Case("do_sample=True, temperature=0.0", BOTH_REFUSE),
    Case("do_sample=True, top_k=1", SAME),
    Case("do_sample=True, top_k=0, top_p=1e-6", SAME),
    Case("do_sample=True, min_p=1.0", SAME),
    Case("do_sample=True, top_h=1e-6", SAME),
    Case("do_sample=True, epsilon_cutoff=0.999", SAME),
    Case("do_sample=True, top_k=1, typical_p=0.9, eta_cutoff=1e-3, temperature=0.7", SAME),
    Case("do_sample=True, top_k=1, num_return_sequences=2", SAME),
    Case("num_return_sequences=2", BOTH_REFUSE),
    # logits processors
    Case("repetition_penalty=1.4", SAME),
    Case("encoder_repetition_penalty=1.5", SAME),
    Case("no_repeat_ngram_size=2", SAME),
    Case("encoder_no_repeat_ngram_size=1", SAME),
    Case("bad_words_ids=[[first]]", SAME),
    Case("suppress_tokens=[first]", SAME),
    Case("begin_suppress_tokens=[first]", SAME),
    Case("sequence_bias={(first,): -100.0}", SAME),
    Case("forced_bos_token_id=9", SAME),
    Case("forced_eos_token_id=9", SAME),
    Case("forced_eos_token_id=9, max_length=n + 6", SAME),
    Case("exponential_decay_length_penalty=(3, 1.8)", SAME),
    Case("renormalize_logits=True", SAME),
    Case("remove_invalid_values=True", SAME),
    Case("watermarking_config=WatermarkingConfig(bias=9.0)", SAME),
    Case("logits_processor=[RepetitionPenaltyLogitsProcessor(1.4)]", SAME),
    Case(
        "logits_processor=[MinNewTokensLengthLogitsProcessor(n, 9, stop)], eos_token_id=stop", SAME
    ),
    Case("logits_processor=[NoRepeatNGramLogitsProcessor(2)], no_repeat_ngram_size=1", SAME),
    Case("logits_processor=[Pure()]", SAME),
    Case("logits_processor=[Stateful()]", DENSE),
    Case("prefix_allowed_tokens_fn=lambda row, ids: [7 + row, 30 + len(ids) % 3]", DENSE),
    Case(
        "watermarking_config=SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3),"
        " do_sample=True, top_k=1",
        DENSE,
    ),
    # outputs
    Case("return_dict_in_generate=True", SAME),
    Case("return_dict_in_generate=True, output_scores=True, output_logits=True", SAME),
    Case(
        "return_dict_in_generate=True, output_scores=True, output_logits=True, eos_token_id=stop,"
        " repetition_penalty=1.2",
        SAME,
    ),
    Case("output_scores=True", SAME),
    # refused
    Case("num_beams=2", "num_beams = 2: beam search is not supported"),
    Case(
        "generation_config=GenerationConfig(num_beams=2)",
        "num_beams = 2: beam search is not supported",
    ),
    Case(
        "penalty_alpha=0.6, top_k=4",
        "penalty_alpha = 0.6: contrastive search is not supported: transformers runs it with code"
        " from the hub, which the engine does not",
    ),
    Case(
        "dola_layers='low'",
        "dola_layers = 'low': DoLa is not supported: transformers runs it with code from the hub,"
        " which the engine does not",
    ),
    Case(
        "guidance_scale=1.5",
        "guidance_scale = 1.5: classifier-free guidance is not supported: it needs a second"
        " forward pass",
    ),
    Case(
        "token_healing=True",
        "token_healing = True: token healing is not supported: it changes prompts",
    ),
    Case(
        "force_words_ids=[[5]]",
        "force_words_ids = [[5]]: constrained beam search is not supported",
    ),
    Case("constraints=[]", "constraints = []: constrained beam search is not supported"),
    Case(
        "prompt_lookup_num_tokens=3",
        "prompt_lookup_num_tokens = 3: drafts are chosen by sparse_to_dense(model, draft), not by"
        ' the call: prompt lookup is Draft("ngram")',
    ),
    Case(
        "assistant_early_exit=1",
        "assistant_early_exit = 1: drafts are chosen by sparse_to_dense(model, draft), not by the"
        ' call: early exit is Draft("full", depth=…)',
    ),
    Case(
        "use_mtp=True",
        "use_mtp = True: drafts are chosen by sparse_to_dense(model, draft), not by the call, and"
        " multi-token prediction is none of them",
    ),
    Case(
        "assistant_model=object()",
        "assistant_model is given: drafts are chosen by sparse_to_dense(model, draft), not by the"
        " call",
    ),
    Case("is_assistant=True", "is_assistant = True: the engine does not draft for other models"),
    Case(
        "cache_implementation='quantized'",
        "cache_implementation = 'quantized': the engine has caches of its own, on the model's"
        " device",
    ),
    Case(
        "return_dict_in_generate=True, output_attentions=True",
        "output_attentions = True: attention weights are not kept",
    ),
    Case(
        "return_dict_in_generate=True, output_hidden_states=True",
        "output_hidden_states = True: hidden states are not kept",
    ),
    Case(
        "negative_prompt_ids=ids",
        "negative_prompt_ids is given: classifier-free guidance is not supported: it needs a second"
        " forward pass",
    ),
    Case(
        "custom_generate='folder'",
        "custom_generate is given: decoding loops other than the engine's are not supported",
    ),
    Case(
        "synced_gpus=True", "synced_gpus is given: the engine does not run under FSDP or DeepSpeed"
    ),
    Case(
        "seed=3, logits_processor=[Stateful()]",
        "seed = 3 with the logits processor Stateful: such a call is handed to the model's own"
        " generate, which takes no seed",
    ),
]


# A processor's batch: a row with an image, a row with a video.
VISUAL_CASES = [
    Case("**batch", SAME),
    Case("**without('attention_mask')", SAME),
    Case("**batch, do_sample=True, top_k=1, num_return_sequences=2", SAME),
    Case("**batch, streamer=Recorder()", SAME),
    Case("**batch, return_dict_in_generate=True, output_scores=True", SAME),
    Case("**batch, num_beams=2", "num_beams = 2: beam search is not supported"),
    Case(
        "**twice('pixel_values', 'image_grid_thw', 'image_sizes')",
        "the batch has more images than its rows have placeholders for",
    ),
    Case(
        "**twice('pixel_values_videos', 'video_grid_thw', 'second_per_grid_ts')",
        "the batch has more videos than its rows have placeholders for",
    ),
]
QWEN_CASES = [
    Case(
        "**without('mm_token_type_ids')",
        "mm_token_type_ids is missing: without it generate would give visual tokens the positions"
        " of text; the processor returns it beside input_ids",
    ),
    Case(
        "**twice('pixel_values')",
        "the grids have 24 patches, the pixel values 48",
    ),
    Case(
        "**without('pixel_values', 'image_grid_thw')",
        "row 0 has 6 placeholders of images, which is no number of whole images",
    ),
]
LLAVA_CASES = [
    Case("**without('batch_num_images')", SAME),
    Case("**two_images()", SAME),
    Case(
        "**flat_images()",
        "batch_num_images has 2 entries, and placeholders for images are in 1 of 2 rows: give the"
        " processor a list of images for each row",
    ),
    Case(
        "**two_images('batch_num_images')",
        "batch_num_images is missing, which says how many of 3 images each row has",
    ),
]


def table(cases: list[Case]) -> str:
    """Cases as a Markdown table."""
    rows = [f"| `{case.call}` | {case.outcome} |" for case in cases]
    return "\n".join(["| keywords | outcome |", "|---|---|", *rows])


if __name__ == "__main__":
    for cases in (TEXT_CASES, VISUAL_CASES, QWEN_CASES, LLAVA_CASES):
        print(table(cases), end="\n\n")
