"""Why a wave is decoded as it is, in one sentence for an operator."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.plan.choose import MIN_SPEEDUP
from pipeline.plan.settings import WaveConfig
from pipeline.records import DraftOption
from std_core.cost_model.profile import Profile
from std_core.types import Draft


def describe_draft(draft: Draft | None) -> str:
    """A draft in a few words: policy, what it keeps, which weights are cheaper, γ."""
    if draft is None:
        return "dense"
    words: list[str] = [draft.policy]
    if draft.policy not in ("full", "ngram"):
        words.append(str(draft.k) if draft.k else f"{draft.keep:g}")
    if draft.weights != "full":
        words.append(draft.weights)
    if draft.depth < 1:
        words.append(f"depth {draft.depth:g}")
    if draft.channels < 1:
        words.append(f"channels {draft.channels:g}")
    if draft.model:
        words.append(f"by {draft.model}")
    return " ".join([*words, f"γ{draft.gamma}"])


def explain_choice(options: Sequence[DraftOption], profile: Profile, config: WaveConfig) -> str:
    """Why the first option was chosen.

    Args:
        options: as `DraftPlanner.options` returns them.
    """
    chosen, *others = options
    if config.draft is None:
        return "dense, as --mode dense asks for"
    if chosen.draft is None:
        return _why_dense(others, profile)
    name = describe_draft(chosen.draft)
    if config.draft != "auto":
        return f"{name}, as the command line asks for"
    saved = " and ".join(what_is_saved(chosen.draft))
    dense = next((option for option in others if option.draft is None), None)
    bytes_read = f"{chosen.bytes_per_token / 1e6:.3g} MB"
    if dense is not None:
        bytes_read += f" instead of {dense.bytes_per_token / 1e6:.3g} MB"
    speed = f"{chosen.speedup:.2f} times as fast as without (the bytes alone allow "
    speed += f"{chosen.speedup_bound:.2f})"
    return (
        f"{name}: its drafts read {saved}, so that a generated token takes {bytes_read} of "
        f"reading; {chosen.acceptance:.0%} of its tokens are accepted, and decoding is {speed}"
    )


def _why_dense(others: Sequence[DraftOption], profile: Profile) -> str:
    drafts = [option for option in others if option.draft is not None]
    if not drafts:
        return "dense: no draft was calibrated"
    if not profile.measured and profile.device.kind == "cpu":
        names = " and ".join(option.draft.policy for option in drafts if option.draft)
        return (
            f"dense: nothing was measured on this machine. A long run tries {names}, and "
            "jobs/calibrate.py measures"
        )
    best = max(drafts, key=lambda option: option.speedup)
    return (
        f"dense: the best draft, {describe_draft(best.draft)}, is predicted to be "
        f"{best.speedup:.2f} times as fast, and {MIN_SPEEDUP} is needed"
    )


def what_is_saved(draft: Draft) -> list[str]:
    """What a draft reads less of, as noun phrases."""
    if draft.policy == "ngram":
        return ["no weights and no KV entries"]
    saved: list[str] = []
    if draft.model:
        saved.append("a smaller model")
    if draft.policy != "full":
        kept = f"{draft.k}" if draft.k is not None else f"{draft.keep:.0%}"
        saved.append(f"{kept} of the visual KV entries")
    if draft.weights != "full":
        saved.append(f"{draft.weights} weights")
    if draft.channels < 1:
        saved.append(f"{draft.channels:.0%} of the input channels")
    if draft.depth < 1:
        saved.append(f"{draft.depth:.0%} of the layers")
    return saved or ["all weights and KV entries"]
