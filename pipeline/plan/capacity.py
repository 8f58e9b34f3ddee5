"""What fits in a device's memory: slots of a wave, and requests that are too large for any."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.plan.settings import WaveConfig, longest_request
from pipeline.records import PlannedRequest, RequestError
from std_core.cost_model.memory import LongestRequest, max_slots, memory_breakdown, peak_memory
from std_core.cost_model.model_size import ModelSize
from std_core.cost_model.profile import Profile
from std_core.types import Draft

USABLE_MEMORY = 0.9  # of the device's, that a plan may fill


@dataclass(frozen=True)
class Capacity:
    """The memory of one device, as a job's waves use it."""

    profile: Profile
    config: WaveConfig
    _slots: dict[tuple[LongestRequest, Draft | None], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def slots(self, longest: LongestRequest, draft: Draft | None) -> int:
        """Slots, up to the configured number, that fit if all hold such requests; 0 if none."""
        key = (longest, draft)
        if key not in self._slots:
            self._slots[key] = max_slots(
                self.profile.model_size,
                longest,
                USABLE_MEMORY * self.profile.device.memory,
                self.config.max_num_seqs,
                draft=draft,
                second_model=self._second_model(draft),
                device_kind=self.profile.device.kind,
            )
        return self._slots[key]

    def memory_breakdown(
        self, longest: LongestRequest, draft: Draft | None, slots: int
    ) -> dict[str, float]:
        """Bytes by purpose, see `std_core.cost_model.memory.memory_breakdown`."""
        return memory_breakdown(
            self.profile.model_size,
            longest,
            slots,
            draft=draft,
            second_model=self._second_model(draft),
            device_kind=self.profile.device.kind,
        )

    def slots_for(self, request: PlannedRequest) -> int:
        """Slots of a wave whose longest request is this one; 0 if the request does not fit."""
        return self.slots(longest_request(request, self.config), self._mandatory_draft)

    def fits(self, longest: LongestRequest) -> bool:
        """Whether a single slot fits that holds such a request."""
        needed = self.memory_breakdown(longest, self._mandatory_draft, slots=1)
        return peak_memory(needed) <= USABLE_MEMORY * self.profile.device.memory

    def misfit(self, request: PlannedRequest) -> RequestError | None:
        """The error of a request that no wave can hold; None if it fits."""
        if self.fits(longest_request(request, self.config)):
            return None
        return RequestError("out_of_memory", self.advice(request))

    def advice(self, request: PlannedRequest) -> str:
        """One sentence: what a request needs, what the device has, which flags would help."""
        needed = self.memory_breakdown(
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
            f"a request of {request.context} tokens needs {peak_memory(needed) / 1e9:.1f} GB "
            f"alone, {needed[largest] / 1e9:.1f} of them for {largest.replace('_', ' ')}, "
            f"and {device.name} can give {USABLE_MEMORY * device.memory / 1e9:.1f}: "
            f"{remedy} would help"
        )

    @property
    def _mandatory_draft(self) -> Draft | None:
        """The draft that every wave has to hold. Where the planner may choose, a wave can always
        decode densely, so there is none."""
        return None if self.config.draft == "auto" else self.config.draft

    def _second_model(self, draft: Draft | None) -> ModelSize | None:
        """Size of the second model that drafts, if the draft has one and it was calibrated."""
        if draft is None or not draft.model:
            return None
        for calibrated in self.profile.drafts:
            if calibrated.draft.model == draft.model:
                return calibrated.second_model
        return None
