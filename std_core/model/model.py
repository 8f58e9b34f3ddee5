"""A Hugging Face model as it is, behind a few verbs: see, place, embed, extend, step.

Its attention is ours through `AttentionInterface`; vision tower, merging of placeholders and M-RoPE
index stay its own. Positions are always passed: what the model remembers of them (`rope_deltas`) is
stale as soon as requests interleave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import AttentionInterface, GgufConfig

from std_core.model.cache import DecodeStep, KVCache, PrefillStep
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.model.cpu_modules import use_cpu_kernels
from std_core.model.families import (
    FAMILIES,
    generation_class,
    has_vision_tower,
    sliding_window_of,
    unsupported_reason,
)
from std_core.model.tensor_parallel import (
    SINGLE_RANK,
    TensorParallelGroup,
    localize_shards,
    sharding_kwargs,
)
from std_core.types import RequestError

ATTENTION = "std_core"


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    kv: PrefillStep | DecodeStep | _Probe,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: (B, heads, T, d) in, (B, T, heads, d) out."""
    if isinstance(kv, _Probe):
        kv.called(module, query, key, value, more=more)
    return kv.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attend)


class _Probe:
    """In place of caches, for one token that is alone: notes what a model asks of its attention."""

    def __init__(self, text: Any, layers: int, shape: tuple[int, int]):
        self.text = text
        self.expected = list(range(layers))
        self.shape = shape
        self.layers: list[int] = []
        self.strange: set[str] = set()

    def called(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        more: dict[str, Any],
    ) -> None:
        if more.get("softcap"):
            self.strange.add("caps its attention scores")
        if more.get("s_aux") is not None:
            self.strange.add("has attention sinks that are no tokens")
        if more.get("sliding_window") and sliding_window_of(self.text):
            self.strange.add("attends through a sliding window")
        if not getattr(module, "is_causal", True):
            self.strange.add("reads in both directions")
        if (
            (key.shape[1], key.shape[3]) != self.shape
            or key.shape != value.shape
            or query.shape[3] != self.shape[1]
        ):
            self.strange.add("has keys and values of sizes other than its configuration says")

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.layers.append(layer)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def complaint(self) -> str | None:
        if self.layers != self.expected:
            self.strange.add("does not ask for its attention once in each layer")
        return " and ".join(sorted(self.strange)) or None


class Model:
    """A loaded Hugging Face model, driven by our caches; the model object itself is changed in
    nothing but the name of its attention.

    Raises ValueError where its architecture is none that `AttentionInterface` reaches, or has
    attention that our caches do not know (sliding windows, linear attention, sinks); what its
    configuration does not tell, one token does."""

    def __init__(self, hf: Any, ranks: TensorParallelGroup = SINGLE_RANK):
        text = hf.config.get_text_config()
        name = f"model of type {hf.config.model_type}"
        if why := unsupported_reason(hf.config, type(hf)):
            raise ValueError(f"{name} {why}")
        self.has_vision_tower = has_vision_tower(hf.config)
        self._theirs = _attention_of(hf.config)
        self._ours = (
            {"text_config": ATTENTION, "vision_config": "sdpa"}
            if self.has_vision_tower
            else {"": ATTENTION}
        )
        self.hf = hf.eval()
        self.install_attention()
        self.decoder = hf.get_decoder()
        self.head = hf.get_output_embeddings()
        self.embedding = hf.get_input_embeddings()
        self.layers = text.num_hidden_layers
        self.tensor_parallel = ranks
        self.kv_heads = (
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        ) // ranks.size
        self.head_dim = (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )
        self.hidden_size = self.embedding.embedding_dim
        tower = hf.config.vision_config if self.has_vision_tower else None
        self.feature_levels = 1 + len(getattr(tower, "deepstack_visual_indexes", ()))
        self.vocab_size = self.head.out_features
        self.dtype = self.embedding.weight.dtype
        self.device = self.embedding.weight.device
        layer_device_map = getattr(hf, "hf_device_map", {})
        self.layer_devices = [
            layer_device_map.get(name, self.device) for name in decoder_layer_names(hf)
        ]  # of each layer
        if why := self._strange():
            self.restore_attention()
            raise ValueError(f"{name} {why}, which cannot be driven")
        self.decoder, self.head = use_cpu_kernels(self.decoder), use_cpu_kernels(self.head)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *devices: str,
        ranks: TensorParallelGroup = SINGLE_RANK,
    ) -> Model:
        """A checkpoint's weights (GGUF's unpacked), read in full, on one device or with its layers
        spread over several; of several ranks each reads its share.

        Raises: ValueError: they are missing, incomplete, or of an architecture that cannot be
            driven or divided.
        """
        gguf = "gguf_file" in checkpoint.source
        writer: Any = generation_class(
            checkpoint.config
        )  # a checkpoint without one is refused at its load
        how = sharding_kwargs(writer, checkpoint.config, ranks)
        how |= (
            {"quantization_config": GgufConfig(dequantize=True)}
            if gguf
            else {"use_safetensors": True}
        )
        try:
            hf, prompt_logits = writer.from_pretrained(
                **checkpoint.source, **how, dtype=dtype, output_loading_info=True
            )
        except (OSError, SafetensorError) as error:
            why = str(error).splitlines()[0]
            raise ValueError(
                f"the weights of model {checkpoint.path!r} cannot be read: {why}"
            ) from error
        if lacking := sorted(prompt_logits["missing_keys"]):
            raise ValueError(
                f"model {checkpoint.path!r} lacks {len(lacking)} weights, {lacking[0]} among them"
            )
        if len(devices) > 1:  # accelerate's hooks move what passes from one layer to the next
            from accelerate import dispatch_model

            return cls(dispatch_model(hf, layer_device_map(hf, devices), force_hooks=True))
        if ranks.size > 1:
            return cls(localize_shards(hf, devices[0], ranks), ranks)
        return cls(hf.to(devices[0]))

    def install_attention(self) -> None:
        """Puts our attention in place; the model's own `generate` does not work as long as it
        is."""
        self.hf.set_attn_implementation(self._ours)

    def restore_attention(self) -> None:
        """Puts the attention that the model came with in its place again."""
        self.hf.set_attn_implementation(self._theirs)

    @torch.inference_mode()
    def _strange(self) -> str | None:
        """What one token's way through the model shows that our caches or our use of its head would
        not do."""
        shape = (self.kv_heads, self.head_dim)
        probe, whole = (
            _Probe(self.hf.config.get_text_config(), self.layers, shape) for _ in range(2)
        )
        # no real token's, whose embedding may be zero, as that of padding often is
        embeds = torch.linspace(-1, 1, self.hidden_size, dtype=self.dtype, device=self.device)[
            None, None
        ]
        position_ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        ours = self.head(self._decode(embeds, position_ids, probe))
        if why := probe.complaint():
            return why
        theirs = self.hf(
            inputs_embeds=embeds, position_ids=position_ids, use_cache=False, kv=whole
        ).logits
        return (
            None
            if torch.allclose(ours, theirs, equal_nan=True)
            else "does more to its logits than its head"
        )

    def new_cache(self, rows: int) -> KVCache:
        return KVCache(
            self.layer_devices[: self.layers],
            rows=rows,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    def encode_vision(self, inputs: ModelInputs) -> torch.Tensor:
        """The vision tower: (m_v, hidden × levels) features of all visual tokens, in the order of
        their places. Videos go through it in pieces, so what it works on does not grow with their
        length."""
        width = self.hidden_size * self.feature_levels
        features = torch.empty(
            len(inputs.visual_positions), width, dtype=self.dtype, device=self.device
        )
        kinds = inputs.token_types[0][inputs.token_types[0] != 0].to(self.device)
        look = FAMILIES[self.hf.config.model_type].look
        for kind, patches, grid in (
            (1, inputs.image_patches, inputs.image_grid),
            (2, inputs.video_patches, inputs.video_grid),
        ):
            places = (kinds == kind).nonzero()[:, 0]
            given = 0
            for seen in (
                look(self.hf, kind, patches, grid)
                if patches is not None and grid is not None
                else ()
            ):
                to = places[given : given + len(seen)]
                features[to] = seen[: len(to)].to(self.dtype)
                given += len(seen)
            if given != len(places):
                why = f"the prompt has {len(places)} places for visual tokens, the vision tower gave {given}"
                raise RequestError("placeholder_mismatch", why)
        return features

    def position_ids(self, inputs: ModelInputs) -> tuple[torch.Tensor, int]:
        """Positions (1 or 3, 1, n) of a prompt, and that of the first token behind it, which is one
        past the last one's own (as `generate` has it), not past the largest."""
        if len(inputs.visual_positions) and hasattr(self.hf.model, "get_rope_index"):
            positions, _ = self.hf.model.get_rope_index(
                inputs.ids,
                mm_token_type_ids=inputs.token_types,
                image_grid_thw=inputs.image_grid,
                video_grid_thw=inputs.video_grid,
                second_per_grid_ts=inputs.second_per_grid,
            )
        else:
            positions = torch.arange(inputs.ids.shape[1])[None, None]
        return positions.to(self.device), int(positions[..., -1].max()) + 1

    def embed(
        self,
        ids: torch.Tensor,
        types: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(1, n, hidden × levels): ids (1, n), with features at the places whose type is not 0.
        Levels above the first, which are DeepStack's, are zero at the others, and left out where
        there are no features."""
        embeds = self.embedding(ids)
        if types is None or features is None:
            return embeds
        embeds = F.pad(embeds, (0, features.shape[1] - embeds.shape[2]))
        return embeds.masked_scatter((types != 0).to(self.device)[..., None], features)

    def embed_part(
        self, inputs: ModelInputs, features: torch.Tensor | None, at: int, end: int
    ) -> torch.Tensor:
        """Places `at` to `end` of a prompt alone: as `embed` has all of it."""
        types = inputs.token_types[:, at:end]
        before = int((inputs.token_types[:, :at] != 0).sum())
        if features is not None:
            features = features[before : before + int((types != 0).sum())]
        return self.embed(inputs.ids[:, at:end].to(self.device), types, features)

    def prefill_chunk(
        self, embeds: torch.Tensor, positions: torch.Tensor, kv: PrefillStep
    ) -> torch.Tensor:
        """Logits (vocabulary,) behind a chunk of a prompt."""
        return self.head(self._decode(embeds, positions, kv)[0, -1])

    @torch.inference_mode()
    def prompt_logits(self, inputs: ModelInputs) -> torch.Tensor:
        """Logits (vocabulary,) behind a whole prompt, in one piece and without any of it kept."""
        kv = PrefillStep(self.new_cache(1), 0, 0)
        kv.store.reserve(inputs.ids.shape[1])
        features = self.encode_vision(inputs) if len(inputs.visual_positions) else None
        embeds = self.embed(inputs.ids.to(self.device), inputs.token_types, features)
        return self.prefill_chunk(embeds, self.position_ids(inputs)[0], kv)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, kv: DecodeStep) -> torch.Tensor:
        """Logits (B, T, vocabulary) behind each of `tokens` (B, T) at `positions` (B, T)."""
        return self.head(self._decode(self.embedding(tokens), positions, kv))

    def _decode(
        self, embeds: torch.Tensor, positions: torch.Tensor, kv: PrefillStep | DecodeStep | _Probe
    ) -> torch.Tensor:
        if positions.ndim == 3 and len(positions) == 1:
            positions = positions[0]
        hidden, *deep = embeds.split(self.hidden_size, dim=-1)
        more: dict[str, Any] = {}
        if deep:  # added at every place: it is zero where there is nothing to add
            everywhere = torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.device)
            more = {
                "visual_pos_masks": everywhere,
                "deepstack_visual_embeds": [level.flatten(0, 1) for level in deep],
            }
        return self.decoder(
            inputs_embeds=hidden,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            kv=kv,
            **more,
        ).last_hidden_state


def _attention_of(config: Any) -> dict[str, str]:
    """The names of a model's attention, as `set_attn_implementation` takes them."""
    parts = {name: getattr(config, name)._attn_implementation for name in config.sub_configs}
    return {"": config._attn_implementation} | parts


def decoder_layer_names(hf: Any) -> list[str]:
    """The text stack's layers, by their names in the whole model, in order."""
    names = {id(module): name for name, module in hf.named_modules()}
    return [names[id(layer)] for layer in hf.get_decoder().layers]


def layer_device_map(hf: Any, devices: Sequence[str]) -> dict[str, str]:
    """A device map for accelerate: equally many layers to each device, in order, and all else
    (vision tower, embedding, norm, head) to the first, so that tokens are fed and chosen in one
    place.

    Raises:
        ValueError: more devices than layers.
    """
    names = decoder_layer_names(hf)
    if len(devices) > len(names):
        raise ValueError(f"{len(names)} layers cannot be spread over {len(devices)} devices")
    of_layer = {name: devices[at * len(devices) // len(names)] for at, name in enumerate(names)}
    others = [
        n
        for n, m in hf.named_modules()
        if n and not any(x == n or x.startswith(f"{n}.") for x in names)
    ]
    inside = tuple(f"{name}." for name in names)
    top = [
        n
        for n in others
        if not n.startswith(inside) and not any(n.startswith(f"{o}.") for o in others)
    ]
    return of_layer | dict.fromkeys(top, devices[0])
