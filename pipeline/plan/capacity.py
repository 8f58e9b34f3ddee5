"""What fits in a device's memory: slots of a wave, and requests that are too large for any."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.settings import WaveConfig, longest_request
from pipeline.records import PlannedRequest, RequestError
from std_core.cost_model.account import ModelSize
from std_core.cost_model.memory import LongestRequest, most_slots, terms, total
from std_core.cost_model.profile import Profile
from std_core.types import Draft

USABLE_MEMORY = 0.9  # of the device's, that a plan may fill


@dataclass(frozen=True)
class Capacity:
    """The memory of one device, as a job's waves use it."""

    profile: Profile
    config: WaveConfig

    def slots(self, longest: LongestRequest, draft: Draft | None) -> int:
        """Slots, up to the configured number, that fit if all hold such requests; 0 if none."""
        return most_slots(
            self.profile.account,
            longest,
            USABLE_MEMORY * self.profile.device.memory,
            self.config.max_num_seqs,
            draft=draft,
            pair=self._second_model(draft),
            kind=self.profile.device.kind,
        )

    def bytes_by_use(
        self, longest: LongestRequest, draft: Draft | None, slots: int
    ) -> dict[str, float]:
        """Bytes of each term of `std_core.cost_model.memory.terms`."""
        return terms(
            self.profile.account,
            longest,
            slots,
            draft=draft,
            pair=self._second_model(draft),
            kind=self.profile.device.kind,
        )

    def slots_for(self, request: PlannedRequest) -> int:
        """Slots of a wave whose longest request is this one; 0 if the request does not fit."""
        return self.slots(longest_request(request, self.config), self._mandatory_draft)

    def misfit(self, request: PlannedRequest) -> RequestError | None:
        """The error of a request that no wave can hold; None if it fits."""
        if self.slots_for(request):
            return None
        return RequestError("out_of_memory", self.advice(request))

    def advice(self, request: PlannedRequest) -> str:
        """One sentence: what a request needs, what the device has, which flags would help."""
        needed = self.bytes_by_use(
            longest_request(request, self.config), self._mandatory_draft, slots=1
        )
        largest = max(needed, key=lambda name: needed[name])
        if largest in ("weights", "draft_weights"):
            remedy = (
                "a smaller model, --dtype bfloat16, or more GPUs per engine "
                "(--pipeline-parallel-size)"
            )
        else:
            remedy = "lower fps, max_frames, max_pixels, total_pixels or --max-tokens"
        device = self.profile.device
        return (
            f"a request of {request.context} tokens needs {total(needed) / 1e9:.1f} GB alone, "
            f"{needed[largest] / 1e9:.1f} of them for {largest.replace('_', ' ')}, "
            f"and {device.name} can give {USABLE_MEMORY * device.memory / 1e9:.1f}: "
            f"{remedy} would help"
        )

    @property
    def _mandatory_draft(self) -> Draft | None:
        """The draft that every wave has to hold. Where the planner may choose, a wave can always
        decode densely, so there is none."""
        if self.config.draft != "auto":
            return self.config.draft
        return None if self.profile.drafts else self.config.default

    def _second_model(self, draft: Draft | None) -> ModelSize | None:
        """Size of the second model that drafts, if the draft has one and it was calibrated."""
        if draft is None or not draft.model:
            return None
        for calibrated in self.profile.drafts:
            if calibrated.draft.model == draft.model:
                return calibrated.pair
        return None
