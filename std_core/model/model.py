"""An unmodified Hugging Face model, driven with our own KV caches.

`AttentionInterface` replaces the text stack's attention. The vision tower stays transformers' own.
Positions are always passed explicitly: by the rule that the checkpoint was trained with
(`positions`), and because `rope_deltas`, which the model keeps, is stale as soon as requests
interleave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import AttentionInterface, GgufConfig

from std_core.model.architecture_check import AttentionTrace, UnsupportedCall
from std_core.model.cache import DecodeStep, KVCache, PrefillStep
from std_core.model.checkpoint import Checkpoint, ModelInputs
from std_core.model.cpu_modules import use_cpu_kernels
from std_core.model.device_map import decoder_layer_names, layer_device_map
from std_core.model.families import (
    FAMILIES,
    IMAGE,
    VIDEO,
    generation_class,
    has_vision_tower,
    unattachable_reason,
)
from std_core.model.model_state import unfaithful_reason
from std_core.model.module_view import private_view, uncompiled
from std_core.model.positions import (
    MRope,
    PositionRule,
    reference_positions,
    rule_of,
    text_positions,
    transformers_positions,
)
from std_core.model.tensor_parallel import (
    SINGLE_RANK,
    TensorParallelGroup,
    localize_shards,
    sharding_kwargs,
)
from std_core.types import RequestError

ATTENTION = "std_core"
AttentionStep = PrefillStep | DecodeStep | AttentionTrace


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    kv: AttentionStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of each layer, with transformers' signature.

    Args:
        query, key, value: (B, heads, T, head size).
        kv: passed to the decoder as a keyword.

    Returns:
        (B, T, heads, head size).

    Raises:
        UnsupportedCall: the layers do not pass `kv` on.
    """
    if kv is None:
        raise UnsupportedCall("does not pass keyword arguments on to its attention")
    if isinstance(kv, AttentionTrace):
        kv.record(module, query, key, value, options={**options, "mask": attention_mask})
    output = kv.attend(module.layer_idx, query, key, value, scaling)
    # some models view the result, as they may: transformers' own attention functions copy as well
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


class Model:
    """A loaded Hugging Face model, of which nothing is changed.

    Attributes:
        hf: the Hugging Face model as it was given.
        view: our own modules over its tensors, with our attention; see `module_view`.
        decoder: the view's text stack, on our CPU kernels where they apply.
        head: its output head, likewise.
        kv_heads: of this tensor-parallel rank.
        feature_levels: features per visual token: the last layer's, and one per DeepStack level.
        layer_devices: of each layer.
        tp_group: the ranks that share the model.
        owns_weights: nobody else uses the weights, so their layout in memory may change.
        position_rule, mrope: how M-RoPE's positions are computed; None without M-RoPE.

    Raises:
        ValueError: the architecture is not supported. What its configuration does not state is
            found by running one token.
    """

    def __init__(
        self,
        hf: Any,
        tp_group: TensorParallelGroup = SINGLE_RANK,
        position_rule: PositionRule | None = None,
        owns_weights: bool = False,
    ):
        """
        Args:
            position_rule: of M-RoPE; if not given, that of the configuration.
            owns_weights: the weights were loaded for this model alone.
        """
        hf = uncompiled(hf)
        if reason := unattachable_reason(hf) or unfaithful_reason(hf):
            raise ValueError(f"{_name(hf)} {reason}")
        self.hf = hf
        self.owns_weights = owns_weights
        self.position_rule = position_rule or rule_of(hf.config)
        self.mrope = MRope.of(hf.config)
        self.has_vision_tower = has_vision_tower(hf.config)
        self.view = private_view(hf)
        self.view.set_attn_implementation(
            {"text_config": ATTENTION, "vision_config": "sdpa"}
            if self.has_vision_tower
            else {"": ATTENTION}
        )
        self.decoder = self.view.get_decoder()
        self.head = self.view.get_output_embeddings()
        self.embedding = self.view.get_input_embeddings()
        self.layers = len(self.decoder.layers)
        self.tp_group = tp_group
        self.hidden_size = self.embedding.embedding_dim
        vision = hf.config.vision_config if self.has_vision_tower else None
        self.feature_levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
        self.vocab_size = self.head.out_features
        self.dtype = self.embedding.weight.dtype
        self.device = self.embedding.weight.device
        device_map = getattr(hf, "hf_device_map", {})
        self.layer_devices = [device_map.get(n, self.device) for n in decoder_layer_names(hf)]
        self.kv_heads, self.head_dim = self._kv_shape()
        self.decoder = use_cpu_kernels(self.decoder)
        self.head = use_cpu_kernels(self.head)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *devices: str,
        tp_group: TensorParallelGroup = SINGLE_RANK,
    ) -> Model:
        """Load a checkpoint's weights; those of a GGUF file are dequantized.

        Args:
            devices: one, or several over which the layers are spread.
            tp_group: ranks that share the model; each reads its own shard of the weights.

        Raises:
            ValueError: weights are missing or incomplete, or the architecture is not supported or
                cannot be sharded.
        """
        model_class: Any = generation_class(checkpoint.config)  # `Checkpoint.load` has checked it
        options = sharding_kwargs(model_class, checkpoint.config, tp_group)
        if "gguf_file" in checkpoint.pretrained_kwargs:
            options["quantization_config"] = GgufConfig(dequantize=True)
        else:
            options["use_safetensors"] = True
        try:
            hf, loading = model_class.from_pretrained(
                **checkpoint.pretrained_kwargs, **options, dtype=dtype, output_loading_info=True
            )
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"the weights of model {checkpoint.path!r} cannot be read: {reason}"
            ) from error
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"model {checkpoint.path!r} lacks {len(missing)} weights, {missing[0]} among them"
            )
        if len(devices) > 1:
            from accelerate import dispatch_model

            # accelerate's hooks move activations from one layer's device to the next one's
            spread = dispatch_model(hf, layer_device_map(hf, devices), force_hooks=True)
            return cls(spread, owns_weights=True)
        if tp_group.size > 1:
            return cls(localize_shards(hf, devices[0], tp_group), tp_group, owns_weights=True)
        return cls(hf.to(devices[0]), owns_weights=True)

    def _kv_shape(self) -> tuple[int, int]:
        """Run one token; return the KV heads of this rank and their size.

        Raises:
            ValueError: the token shows that the model is not supported.
        """
        trace = AttentionTrace(self.hf.config.get_text_config(), self.layers)
        try:
            reason = self._check_one_token(trace)
        except UnsupportedCall as error:
            reason = str(error)
        except Exception as error:  # transformers' own code may fail in any way
            raise ValueError(
                f"{_name(self.hf)} does not run on our attention, so it is not supported"
                f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            ) from error
        if reason:
            raise ValueError(f"{_name(self.hf)} {reason}, which is not supported")
        (kv_shape,) = trace.kv_shapes
        return kv_shape

    @torch.inference_mode()
    def _check_one_token(self, trace: AttentionTrace) -> str | None:
        """Compare the parts as the engine runs them with the whole model.

        Returns:
            Why the model is not supported, as a predicate; None if it is.
        """
        # a padding token's embedding is often zero, and shows nothing
        token = self.embedding.weight[:256].float().norm(dim=1).argmax().view(1, 1)
        position = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        logits = self.head(self._decode(self.embedding(token), position, trace))
        if reason := trace.unsupported_reason():
            return reason
        again = AttentionTrace(trace.text, self.layers)
        expected = self.view(token, position_ids=position, use_cache=False, kv=again).logits
        if not torch.allclose(logits, expected, equal_nan=True):
            return "changes its embeddings or its logits outside of its layers"
        return None

    def new_cache(self, rows: int) -> KVCache:
        """Make an empty KV cache for the layers that the model runs."""
        return KVCache(
            self.layer_devices[: self.layers],
            rows=rows,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    # ------------------------------------------------------------------------------------- inputs

    def encode_vision(self, inputs: ModelInputs) -> torch.Tensor:
        """Run the vision tower, videos in chunks, so that its activations have a bounded size.

        Returns:
            (m_v, hidden × feature levels), in the order of the visual tokens' positions.

        Raises:
            RequestError: `placeholder_mismatch`: the prompt has another number of visual tokens.
        """
        width = self.hidden_size * self.feature_levels
        features = torch.empty(
            len(inputs.visual_positions), width, dtype=self.dtype, device=self.device
        )
        visual_types = inputs.token_types[0][inputs.visual_positions].to(self.device)
        encode = FAMILIES[self.hf.config.model_type].encode_vision
        for kind, patches, grid in (
            (IMAGE, inputs.image_patches, inputs.image_grid),
            (VIDEO, inputs.video_patches, inputs.video_grid),
        ):
            indices = (visual_types == kind).nonzero()[:, 0]
            chunks: Iterable[torch.Tensor] = ()
            if patches is not None and grid is not None:
                chunks = encode(self.view, kind, patches, grid)
            count = 0
            for chunk in chunks:
                target = indices[count : count + len(chunk)]
                features[target] = chunk[: len(target)].to(self.dtype)
                count += len(chunk)
            if count != len(indices):
                raise RequestError(
                    "placeholder_mismatch",
                    f"the prompt has {len(indices)} placeholders for visual tokens, "
                    f"the vision tower gave {count}",
                )
        return features

    def position_ids(self, inputs: ModelInputs) -> tuple[torch.Tensor, int]:
        """Compute a prompt's positions.

        Returns:
            Positions (1 or 3, 1, n), and that of the first generated token, which continues as
            text does.

        Raises:
            RequestError: `placeholder_mismatch`, as in `reference_positions`.
        """
        if self.mrope is None or not len(inputs.visual_positions):
            positions = text_positions(inputs.ids.shape[1])
            return positions.to(self.device), inputs.ids.shape[1]
        if self.position_rule == "reference":
            positions = reference_positions(inputs, self.mrope)
            return positions.to(self.device), int(positions.max()) + 1
        positions = transformers_positions(self.hf, inputs)
        # as in `generate`: behind the last token's position, which need not be the largest
        return positions.to(self.device), int(positions[..., -1].max()) + 1

    def embed(
        self,
        ids: torch.Tensor,
        token_types: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed tokens, with visual features in place of the placeholders' embeddings.

        Args:
            ids: (1, n).
            token_types: (1, n), 0 for text.
            features: (visual tokens of `ids`, hidden × feature levels).

        Returns:
            (1, n, hidden × feature levels), where DeepStack's levels of text tokens are zero;
            (1, n, hidden) without features.
        """
        embeds = self.embedding(ids)
        if token_types is None or features is None:
            return embeds
        embeds = F.pad(embeds, (0, features.shape[1] - embeds.shape[2]))
        is_visual = (token_types != 0).to(self.device)
        return embeds.masked_scatter(is_visual[..., None], features)

    def embed_span(
        self, inputs: ModelInputs, features: torch.Tensor | None, start: int, end: int
    ) -> torch.Tensor:
        """Embed the tokens [start, end) of a prompt.

        Args:
            features: of all of the prompt's visual tokens.
        """
        token_types = inputs.token_types[:, start:end]
        if features is not None:
            before = int((inputs.token_types[:, :start] != 0).sum())
            features = features[before : before + int((token_types != 0).sum())]
        return self.embed(inputs.ids[:, start:end].to(self.device), token_types, features)

    # ------------------------------------------------------------------------------------ forward

    def prefill_chunk(
        self, embeds: torch.Tensor, positions: torch.Tensor, kv: PrefillStep
    ) -> torch.Tensor:
        """Run a chunk of a prompt; return the logits (vocabulary,) after its last token."""
        return self.head(self._decode(embeds, positions, kv)[0, -1])

    @torch.inference_mode()
    def prompt_logits(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the logits (vocabulary,) after a whole prompt, run as one chunk."""
        kv = PrefillStep(self.new_cache(1), row=0, start=0)
        kv.cache.reserve(inputs.ids.shape[1])
        features = self.encode_vision(inputs) if len(inputs.visual_positions) else None
        embeds = self.embed(inputs.ids.to(self.device), inputs.token_types, features)
        positions, _ = self.position_ids(inputs)
        return self.prefill_chunk(embeds, positions, kv)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, kv: DecodeStep) -> torch.Tensor:
        """Run T tokens of every row.

        Args:
            tokens, positions: (B, T).

        Returns:
            Logits (B, T, vocabulary) after each token.
        """
        return self.head(self._decode(self.embedding(tokens), positions, kv))

    def _decode(
        self, embeds: torch.Tensor, positions: torch.Tensor, kv: AttentionStep
    ) -> torch.Tensor:
        """Run the text stack; return the last hidden states (B, T, hidden)."""
        if positions.ndim == 3 and len(positions) == 1:
            positions = positions[0]
        hidden, *deepstack = embeds.split(self.hidden_size, dim=-1)
        options: dict[str, Any] = {}
        if deepstack:  # added at all positions, as it is zero at text tokens
            everywhere = torch.ones(embeds.shape[:2], dtype=torch.bool, device=self.device)
            options["visual_pos_masks"] = everywhere
            options["deepstack_visual_embeds"] = [level.flatten(0, 1) for level in deepstack]
        return self.decoder(
            inputs_embeds=hidden,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            kv=kv,
            **options,
        ).last_hidden_state


def _name(hf: Any) -> str:
    model_type = getattr(getattr(hf, "config", None), "model_type", type(hf).__name__)
    return f"model of type {model_type}"
