"""Which draft a wave decodes with: what every candidate reads, how long it is expected to take,
whether it fits.

Pure sums over a profile and what was seen so far; knows no queue, no engine and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.plan.history import History, draft_key
from pipeline.plan.settings import WaveConfig, WaveSummary
from pipeline.records import DraftOption
from std_core.cost_model.acceptance import AcceptanceCounts, AcceptanceCurve
from std_core.cost_model.memory import LongestRequest, max_slots, memory_breakdown
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import CalibratedDraft, DraftSetupLatency, LatencyModel, Profile
from std_core.types import Draft, GammaSchedule

GAIN = 1.05  # predicted, below which a draft is not worth its uncertainty
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10)
# classes of the first token's acceptance in a gamma schedule
LEVELS = 20
MEMORY = 0.9  # of a device's, that is planned with
NONE = AcceptanceCurve((0.0,))  # of the dense loop
UNKNOWN = AcceptanceCounts(2048, "caption", (80,), (20,))  # of a draft that was not calibrated
USUAL = {"caption": 128.0, "question": 32.0}  # tokens written where nothing is known


def choose(
    mix: WaveSummary, profile: Profile, history: History, setting: WaveConfig, turn: int
) -> tuple[DraftOption, ...]:
    """All ways to decode a wave, the chosen one first; none if not a single slot fits.

    Args: turn: number of the wave. One in `EVERY` takes a draft that would have been dropped, so
        that a wrong
            expectation is found out.
    """
    dense = _weighed(None, mix, profile, history, setting=setting)
    if setting.draft is None:
        return tuple(filter(None, [dense]))
    if isinstance(setting.draft, Draft) or not profile.drafts:
        draft = setting.draft if isinstance(setting.draft, Draft) else setting.default
        named = _weighed(_tried(draft, profile), mix, profile, history, setting=setting)
        return tuple(_gains([*filter(None, [named, dense])], dense)) if named else ()
    best = [
        c for c in (_best(t, mix, profile, history, setting=setting) for t in profile.drafts) if c
    ]
    found = sorted(
        _gains([*filter(None, [dense]), *best], dense), key=lambda c: c.seconds_per_request
    )
    chosen = next((c for c in found if c.draft is None or c.speedup >= GAIN), None)
    dropped = [c for c in found if c is not chosen and c.draft is not None]
    if explores := bool(dropped) and history.explores(turn):
        chosen = dropped[history.exploration(turn) % len(dropped)]
    others = [c for c in found if c is not chosen]
    if chosen and chosen.draft is not None:
        chosen = replace(
            chosen,
            gamma_schedule=_gamma_schedule(
                chosen, mix, profile, history, setting=setting, gate=not explores
            ),
        )
        chosen = replace(
            chosen,
            memory=tuple(
                memory_of(mix.longest, profile, chosen.widest_draft, chosen.slots).items()
            ),
        )
    return *filter(None, [chosen]), *others


def slots_of(
    load: LongestRequest, profile: Profile, setting: WaveConfig, draft: Draft | None
) -> int:
    """Slots that fit the device at such requests; 0 if none."""
    memory = MEMORY * profile.device.memory
    return max_slots(
        profile.model_size,
        load,
        memory,
        setting.max_num_seqs,
        draft=draft,
        second_model=_pair(profile, draft),
        device_kind=profile.device.kind,
    )


def memory_of(
    load: LongestRequest, profile: Profile, draft: Draft | None, slots: int
) -> dict[str, float]:
    """Bytes by what they are for."""
    return memory_breakdown(
        profile.model_size, load, slots, draft, _pair(profile, draft), profile.device.kind
    )


def _pair(profile: Profile, draft: Draft | None) -> ModelSize | None:
    """The second model of a draft that has one, if it was calibrated."""
    return next(
        (
            t.second_model
            for t in profile.drafts
            if draft and draft.model and t.draft.model == draft.model
        ),
        None,
    )


def fallback(profile: Profile, setting: WaveConfig) -> Draft | None:
    """The draft without which a wave cannot be; where there is a choice, decoding densely is always
    left."""
    if isinstance(setting.draft, Draft) or setting.draft is None:
        return setting.draft
    return None if profile.drafts else setting.default


def _gains(candidates: list[DraftOption], dense: DraftOption | None) -> Iterator[DraftOption]:
    """Relative to the dense loop; where that does not fit, to the slowest."""
    base = dense or max(candidates, key=lambda c: c.seconds_per_request, default=None)
    return (
        (replace(c, speedup=base.seconds_per_request / c.seconds_per_request) for c in candidates)
        if base
        else iter(())
    )


def _tried(draft: Draft, profile: Profile) -> CalibratedDraft:
    """What is known of a draft, or of one that differs in how much it keeps; what was not
    calibrated is taken to run like the full model."""
    alike = [t for t in profile.drafts if _kind(t.draft) == _kind(draft)]
    known = next(
        (t for t in alike if draft_key(t.draft) == draft_key(draft)), alike[0] if alike else None
    )
    return (
        replace(known, draft=draft)
        if known
        else CalibratedDraft(draft, profile.latency, DraftSetupLatency(), (UNKNOWN,))
    )


def _kind(draft: Draft) -> Draft:
    return replace(draft, gamma=1, keep=1.0, k=None)


def _best(
    tried: CalibratedDraft,
    mix: WaveSummary,
    profile: Profile,
    history: History,
    setting: WaveConfig,
) -> DraftOption | None:
    """With the γ that is expected to be fastest."""
    found = [
        c
        for c in (
            _weighed(t, mix, profile, history, setting=setting) for t in _each(tried, setting)
        )
        if c
    ]
    return min(found, key=lambda c: c.seconds_per_request, default=None)


def _each(tried: CalibratedDraft, setting: WaveConfig) -> list[CalibratedDraft]:
    """A draft with every γ."""
    return [
        replace(tried, draft=replace(tried.draft, gamma=g))
        for g in GAMMAS
        if not setting.strict or g < setting.strict
    ]


def _gamma_schedule(
    chosen: DraftOption,
    mix: WaveSummary,
    profile: Profile,
    history: History,
    setting: WaveConfig,
    gate: bool,
) -> GammaSchedule:
    """What is fastest for any number of rows in a draft's slots and any acceptance, of every γ that
    they have room for and, if it has a gate, of dense steps. A second model, which a dense step
    does not feed, has none."""
    assert chosen.draft is not None
    tried = _tried(chosen.draft, profile)
    gate = gate and not chosen.draft.model
    ways = [
        t
        for t in _each(tried, setting)
        if slots_of(mix.longest, profile, setting, t.draft) >= chosen.slots
    ]
    grown = _written(mix, profile, history, setting) / mix.count / 2
    dense = history.speed(None)
    drafted = history.speed(chosen.draft)
    expected = _expected(tried, mix, history, setting)
    levels = [expected.rescaled((level + 0.5) / LEVELS) for level in range(LEVELS)]
    yields = {
        gamma: [chances.tokens(gamma) for chances in levels]
        for gamma in (0, *(t.draft.gamma for t in ways))
    }

    def fastest(rows: int) -> tuple[int, ...]:
        step = Steps(profile, mix=mix, rows=rows, grown=grown, drawn=setting.drawn)
        times = {t.draft.gamma: step.round(t, setting.strict)[0] * drafted for t in ways}
        if gate:
            times = {0: step.round(None, setting.strict)[0] * dense} | times
        return tuple(
            min(times, key=lambda gamma: times[gamma] / yields[gamma][level])
            for level in range(LEVELS)
        )

    return GammaSchedule(tuple(map(fastest, range(1, chosen.slots + 1))), expected.at(0))


def _weighed(
    tried: CalibratedDraft | None,
    mix: WaveSummary,
    profile: Profile,
    history: History,
    setting: WaveConfig,
) -> DraftOption | None:
    """What is expected of a draft, or of decoding densely; None if it does not fit."""
    draft, pair = (tried.draft, tried.second_model) if tried else (None, None)
    slots = slots_of(mix.longest, profile, setting, draft)
    if not slots:
        return None
    gamma = draft.gamma if draft else 0
    rounds = plain_rounds = rate = 0.0  # of all requests
    for kind, count in mix.kinds:
        length = expected_length(kind, profile, history, setting)
        chances = _chances(tried, mix, kind, history, setting=setting)
        rounds += count * chances.rounds(
            length - 1, gamma
        )  # the first token comes with the prefill
        plain_rounds += count * NONE.rounds(length - 1, 0)
        rate += count * chances.rate(gamma)
    written = _written(mix, profile, history, setting)
    step = Steps(
        profile,
        mix=mix,
        rows=min(slots, mix.count),
        grown=written / mix.count / 2,
        drawn=setting.drawn,
    )
    round_s, read = step.round(tried, setting.strict)
    plain_s, plain = step.round(None, setting.strict)
    once = tried.setup.seconds(mix.context) if tried else 0.0
    return DraftOption(
        draft,
        slots,
        acceptance=rate / mix.count,
        bytes_per_token=rounds / plain_rounds * read / step.rows,
        speedup_bound=plain_rounds * plain / (rounds * read),
        seconds_per_request=rounds / mix.count * round_s / step.rows * history.speed(draft) + once,
        row_round_s=round_s / step.rows,
        row_draft_token_s=(round_s - plain_s) / gamma / step.rows if gamma else 0.0,
        memory=tuple(
            memory_breakdown(
                profile.model_size, mix.longest, slots, draft, pair, profile.device.kind
            ).items()
        ),
    )


def _written(mix: WaveSummary, profile: Profile, history: History, setting: WaveConfig) -> float:
    """Tokens of all requests."""
    return sum(
        count * expected_length(kind, profile, history, setting) for kind, count in mix.kinds
    )


def expected_length(kind: str, profile: Profile, history: History, setting: WaveConfig) -> float:
    """Tokens that such a prompt's text has: as seen in this run, as measured, or as is usual."""
    seen = history.length(kind) or dict(profile.text_lengths).get(kind) or USUAL[kind]
    return min(seen, float(setting.max_tokens))


def _chances(
    tried: CalibratedDraft | None,
    mix: WaveSummary,
    kind: str,
    history: History,
    setting: WaveConfig,
) -> AcceptanceCurve:
    if tried is None:
        return NONE
    return history.chances(tried.draft, kind) or tried.acceptance_curve(
        mix.context, kind, setting.drawn
    )


def _expected(
    tried: CalibratedDraft, mix: WaveSummary, history: History, setting: WaveConfig
) -> AcceptanceCurve:
    """Of all kinds of prompts together."""
    each = [
        (_chances(tried, mix, kind, history, setting=setting), count) for kind, count in mix.kinds
    ]
    places = range(max(len(chances.by_place) for chances, _ in each))
    return AcceptanceCurve(
        tuple(
            sum(chances.at(place) * count for chances, count in each) / mix.count
            for place in places
        )
    )


@dataclass(frozen=True)
class Steps:
    """Steps of a batch of a wave's mean requests, whose rows have written `grown` tokens; `drawn`:
    with noise, which each token's scores take time for, those of a lookup excepted."""

    profile: Profile
    mix: WaveSummary
    rows: int
    grown: float
    drawn: bool = False

    def round(self, tried: CalibratedDraft | None, strict: int = 0) -> tuple[float, float]:
        """Seconds and bytes of γ draft steps and the verification of γ + 1 tokens; of a dense step
        without a draft."""
        gamma = tried.draft.gamma if tried else 0
        width = max(gamma + 1, strict)
        verify_s, read = self._step(
            self.profile.latency, self._full_bytes(), width, self._looked_at()
        )
        noise_s = self.rows * self.profile.sampling_s_per_token if self.drawn else 0.0
        verify_s += (gamma + 1) * noise_s
        if tried is None:
            return verify_s, read
        drafted_s, drafted = self._draft(tried)
        drafted_s += noise_s if tried.draft.policy != "ngram" else 0.0
        return gamma * drafted_s + verify_s, gamma * drafted + read

    def _step(
        self, cost: LatencyModel, read: float, width: int, entries: float
    ) -> tuple[float, float]:
        return cost.seconds(
            read / self.profile.device.bandwidth, self.rows * width, entries * width
        ), read

    def _draft(self, tried: CalibratedDraft) -> tuple[float, float]:
        draft = tried.draft
        model_size = tried.second_model or self.profile.model_size
        if draft.policy == "ngram":
            return self._step(tried.latency, 0.0, 1, 0.0)
        weights = model_size.weights_read(
            None if tried.second_model else draft,
            self.rows,
            self.profile.union_fraction(draft, self.rows),
        )
        if draft.policy == "full" and not tried.second_model:  # it reads what the full model reads
            entries = self._read()
            looked_at = self._looked_at()
        else:
            kept = min(
                self.mix.visual, draft.k if draft.k is not None else draft.keep * self.mix.visual
            )
            entries = looked_at = self.rows * (
                kept + self.mix.context - self.mix.visual + self.grown
            )
        return self._step(
            tried.latency, weights + entries * model_size.kv_read(draft), 1, looked_at
        )

    def _full_bytes(self) -> float:
        model_size = self.profile.model_size
        return model_size.weights_read() + self._read() * model_size.kv_read()

    def _read(self) -> float:
        """Entries: a prefix that rows share once, and one at least."""
        shared = self.mix.visual * max(self.mix.videos / self.mix.count, 1 / self.rows)
        return self.rows * (shared + self.mix.context - self.mix.visual + self.grown)

    def _looked_at(self) -> float:
        """Entries, each by every row."""
        return self.rows * (self.mix.context + self.grown)
