"""Distilling a standard draft (DistillSpec, Zhou et al., arXiv:2310.08461).

The draft is a small model of its own; it learns to say what the target says at every answer token. The divergence is a
choice (`losses.divergence`): the total variation is the rate of rejection itself. On-policy batches hold the draft's
own continuations instead of the target's, so that it learns where it goes wrong when left alone.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decode, drafters, generation, types
from jspec import sampling as sampling_lib
from jspec import topology as topology_lib
from jspec.drafters import base, draft_vocabulary
from jspec.drafters import standard as standard_drafter
from jspec.models import config as model_config
from jspec.models import layers, transformer
from jspec.training import data, linear_start, losses, objectives
from jspec.weights import families, gguf_export, huggingface_export, shared_export

# Parameters that are the target's when the draft starts as its first layers, and stay so.
SHARED = ("embed", "head")


@dataclasses.dataclass(frozen=True)
class RandomDraft:
    """A draft of random weights; whatever is not said is as in the target."""

    num_layers: int = 2
    width: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    ffn_size: int | None = None

    def config(self, target: model_config.TransformerConfig) -> model_config.TransformerConfig:
        """Sizes of the draft.

        Raises:
          ValueError: they do not fit together.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        config = dataclasses.replace(target, windows=(), tied_head=True, **given)
        if config.width % config.num_heads:
            raise ValueError(f"draft: width {config.width} is not a multiple of num_heads {config.num_heads}")
        return dataclasses.replace(config, head_size=config.width // config.num_heads)


@objectives.register("distill")
@dataclasses.dataclass(frozen=True)
class Distill:
    """Settings. The draft starts as exactly one of `layers`, `reference` and `random`.

    layers:      the target's first layers; its embedding and output matrix stay shared and are not trained.
    start:       of those: `linear` finds what the last of them adds by regression on the target's last state
                 (`linear_start`); `target` leaves them as they are.
    reference:   a model with the target's vocabulary, trained whole.
    random:      random weights, trained whole.
    divergence:  `forward_kl`, `reverse_kl`, `jsd` or `tv`.
    on_policy:   share of batches whose answers the draft writes itself.
    temperature: of those.
    depths:      of the chains whose acceptance is measured; nothing is trained by it.
    export:      `shared`: a folder, `draft`, of what the draft does not share with the target; `huggingface`: a whole
                 model as a folder, `draft`; `gguf`: a whole model as a float32 file, `draft.gguf`. None means `shared`
                 for a draft of the target's layers, else `huggingface`.
    """

    layers: int | None = None
    start: Literal["linear", "target"] = "linear"
    reference: str | None = None
    random: RandomDraft | None = None
    divergence: losses.Divergence = "forward_kl"
    on_policy: float = 0.0
    temperature: float = 1.0
    depths: int = 5
    export: Literal["shared", "huggingface", "gguf"] | None = None

    def __post_init__(self):
        base.check_one_source(layers=self.layers, reference=self.reference, random=self.random)
        base.check_count("depths", self.depths, 1)
        if self.layers is not None:
            base.check_count("layers", self.layers, 1)
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy {self.on_policy} is not between 0 and 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} is below 0")
        if self.export == "shared" and self.layers is None:
            raise ValueError("export 'shared': only a draft of the target's layers has something to share")

    def build(self, target: types.Target, vocabulary: objectives.Vocabulary) -> BoundDistill:
        """See `objectives.Objective`.

        Raises:
          ValueError: the draft cannot be had, does not share the target's vocabulary, or has no place in the files that
            are to be written.
        """
        if self.layers is not None:
            config = transformer.first_layers(target.model, self.layers).config
        elif self.random is not None:
            config = self.random.config(target.model.config)
        else:
            config = standard_drafter.load_draft(self.reference, target).model.config
            if config.vocab_size != target.model.config.vocab_size:
                raise ValueError(
                    f"reference {self.reference!r} has {config.vocab_size} rows of output, the target "
                    f"{target.model.config.vocab_size}: their laws cannot be compared"
                )
        export = self.export or ("shared" if self.layers is not None else "huggingface")
        if export != "gguf":
            families.config_json(config)  # fails now rather than after the training
        return BoundDistill(
            config=config,
            reference=self.reference,
            shares=self.layers is not None,
            linear=self.layers is not None and self.start == "linear",
            divergence=self.divergence,
            depths=self.depths,
            on_policy=self.on_policy,
            temperature=self.temperature,
            file_name="draft.gguf" if export == "gguf" else "draft",
            export=export,
        )


@dataclasses.dataclass(frozen=True)
class BoundDistill(objectives.Bound):
    """See `objectives.Objective` and `Distill`. `shares`: the target's embedding and output matrix serve the draft;
    `linear`: it starts in closed form."""

    config: model_config.TransformerConfig
    reference: str | None
    shares: bool
    linear: bool
    divergence: str
    depths: int
    on_policy: float
    temperature: float
    file_name: str
    # Changes nothing that is trained: checkpoints, which know their objective by its repr, do not depend on it.
    export: str = dataclasses.field(default="huggingface", repr=False)
    reach: int = 1

    def init(self, rng_key, target, vocabulary):
        """The target's first layers, a loaded model or a random one."""
        if self.shares:
            params = transformer.first_layers(target.model, self.config.num_layers).params
            params = {name: leaf for name, leaf in params.items() if name not in SHARED}
        elif self.reference is not None:
            params = standard_drafter.load_draft(self.reference, target).model.params
        else:
            params = model_config.init_params(rng_key, self.config)
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)

    def warm(self, trained, target, vocabulary, text):
        """What the last layer adds by regression on the target's last state, before its norm."""
        if not self.linear:
            return trained
        *first, last = trained["layers"]
        scale = 1.0 / trained["final_norm"]

        @jax.jit
        def reading(layer, batch, view):
            outputs, _ = transformer.forward(
                self.model(target.model, trained),
                batch.tokens,
                batch.positions,
                None,
                batch.causal,
                feature_layers=(len(first),),
                logits_at=jnp.zeros((batch.tokens.shape[0], 0), jnp.int32),
            )
            residual = outputs.features[:, :, 0]
            normed = layers.rms_norm(residual, layer["attention_norm"], self.config.norm_eps)
            wanted = batch.at_places(view.final.astype(jnp.float32)) * scale
            gathered = linear_start.gather(layer, self.config, batch, normed)
            return linear_start.Reading(batch.at_places(residual), gathered, wanted, batch.labelled(1))

        last = linear_start.fit_layer(last, self.config, lambda layer: (reading(layer, *each) for each in text()))
        return linear_start.temper({**trained, "layers": [*first, last]}, "final_norm", self, target, vocabulary, text)

    def model(self, target: transformer.Model, trained: dict) -> transformer.Model:
        """The whole draft, with what it shares."""
        params = dict(trained)
        if self.shares:
            dtype = params["final_norm"].dtype
            params |= {name: target.params[name].astype(dtype) for name in SHARED if name in target.params}
        return transformer.Model(params, self.config)

    def loss(self, params, batch, view, rng_key):
        """The divergence at every place whose next token is an answer's."""
        draft: objectives.Draft = params.draft
        model, vocabulary = self.model(params.target, draft.trained), draft.vocabulary
        outputs, _ = transformer.forward(
            model,
            batch.tokens,
            batch.positions,
            None,
            batch.causal,
            feature_layers=("final",),
            logits_at=jnp.zeros((batch.tokens.shape[0], 0), jnp.int32),
        )
        matrix = transformer.output_matrix(model)
        if vocabulary.ids is not None:
            matrix = matrix[vocabulary.ids]
        states, seen = batch.at_places((outputs.features[:, :, 0], view.replace(features=None)))
        own = jax.nn.log_softmax(layers.linear(states, matrix).astype(jnp.float32), axis=-1)
        law, best = vocabulary.law(seen), vocabulary.places(seen.top)
        there = batch.labelled(1)
        distance = losses.divergence(self.divergence, law, own)
        learn = there if self.divergence == "tv" else there & (best >= 0)
        rank, overlap = losses.rank(own, best), losses.overlap(law, own)
        # Depth s of a chain that starts at t is the draft at t + s, the text's tokens before it.
        depths = losses.Depths.of(
            [data.shift(rank, step) for step in range(self.depths)],
            [data.shift(overlap, step) for step in range(self.depths)],
            [batch.labelled(step + 1) for step in range(self.depths)],
        )
        return losses.masked_mean(distance, learn), depths

    def text(self, target, draft, rows, chosen, seed, step):
        """On-policy: the draft's own answers to the first prompt of each row, for a share of the steps."""
        random = np.random.default_rng((seed, step))
        if random.random() >= self.on_policy:
            return rows.take(chosen)
        prompts, lengths = rows.prompts(chosen)
        budget = rows.length - lengths
        output = decode.decode(
            types.Params(self.model(target.model, draft.trained)),
            generation.row_keys(random.integers(0, generation.MAX_SEED, len(chosen)), len(chosen)),
            prompts,
            lengths,
            drafter=drafters.Autoregressive().build(target)[0],
            sampling=sampling_lib.make(
                len(chosen),
                max_new_tokens=budget.tolist(),
                temperature=self.temperature,
                stop_ids=target.stop_ids,
            ),
            max_new_tokens=rows.length,
            capacity=2 * rows.length,  # of fixed size, so that one program serves every batch
        )
        order = jnp.arange(rows.length)
        real = order < output.lengths[:, None]
        segments, answer = jnp.where(real, 0, -1), real & (order >= jnp.asarray(lengths)[:, None])
        return data.Batch(
            tokens=jnp.where(real, output.tokens[:, : rows.length], 0),
            segments=segments,
            positions=jnp.where(real, order, 0),
            answer=answer,
            places=jnp.asarray(data.places(np.asarray(segments), np.asarray(answer), rows.answers)),
        )

    def bind(self, target, draft, gamma):
        """A chain of the draft's tokens."""
        model = self.model(target.model, draft.trained)
        ids = None if draft.vocabulary.ids is None else draft_vocabulary.check(draft.vocabulary.ids, target)
        return target, *standard_drafter.bind(topology_lib.chain(gamma), target, model, ids)

    def save(self, target: types.Target, draft: objectives.Draft, path: str | os.PathLike, base_model: str) -> None:
        """A folder beside the target, or a whole model; the draft vocabulary with it."""
        finished = dataclasses.replace(
            target,
            model=self.model(target.model, draft.trained),
            provenance=types.Provenance(f"a draft for {base_model}"),
            draft_ids=draft.vocabulary.ids,
        )
        if self.export == "shared":
            shared_export.save_shared(finished, target, path)
        else:
            save = gguf_export.save_gguf if self.export == "gguf" else huggingface_export.save_huggingface
            save(finished, path, target_sha256=target.provenance.sha256)
