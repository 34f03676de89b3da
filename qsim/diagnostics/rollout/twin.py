"""The twin of a model in training: the same weights as a serving engine sees them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from qsim.accumulators import Accumulator
from qsim.diagnostics.rollout.engine import Serving, ServingEngine, engine_of, points_in
from qsim.diagnostics.rollout.gap import ComponentGap, RolloutGap
from qsim.diagnostics.rollout.measuring import Rollout, differences, rollout, tokens_of
from qsim.functional.quantizer import Point
from qsim.nn.converting.convert import convert, revert
from qsim.nn.coverage.run import check_plain

if TYPE_CHECKING:
    from qsim.nn.kv_cache import KVCache


def twin(
    model: nn.Module,
    serving: Serving = "fp8",
    *,
    cache: Point = "e4m3",
    router: Point = "bf16",
    accumulate: Accumulator | str | None = None,
    dtype: torch.dtype | None = None,
    exclude: str | Iterable[str] | None = None,
) -> RolloutTwin:
    """Make the serving twin of a language model: the same weights, computed as a serving engine computes them.

    In reinforcement learning an engine samples in low precision what the trainer then learns from, and the two disagree on probabilities.
    `RolloutTwin.gap` measures by how much, and which component of the engine causes it. The weights of the twin are those that
    `qsim.export` would write, and follow the model while it trains.

    Args:
        model: The model in training, converted or not; it is not changed.
        serving: What layers round: `"fp8"`, E4M3 with a scale per row of the weight and per token; `"nvfp4"`; the name of a recipe, a
            recipe or points, of which the forward pass counts, with round-to-nearest; or the folder of an exported checkpoint, whose
            weights the twin then has.
        cache: The rounding of keys and values, which `qsim.nn.KVCache` takes; `None` for none, and for models without `past_key_values`.
        router: The rounding of inputs, weights and results of routers, whose names end in `gate` or `router`.
        accumulate: The accumulator of the products of rounded layers: the engine's order of sums and its matrix unit. Products of two
            activations, as in attention, add as torch does.
        dtype: The dtype in which the engine computes everything else.
        exclude: Pattern or patterns of layers that the engine leaves in high precision; by default the output head of a model of
            transformers. Routers are always left out.

    Raises:
        TypeError: If `serving` is of another type.
        ValueError: If there is no such serving, the model is compiled or wrapped, or the cache is for a model that takes none; and as
            `qsim.convert` and `qsim.load`.

    Example:
        >>> import torch, qsim
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> _ = torch.manual_seed(0)
        >>> sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> found = qsim.twin(model, "fp8").gap(torch.arange(40).view(2, 20))
        >>> [record.component for record in found], found.tokens
        (['weights', 'inputs', 'cache', 'all'], 38)
        >>> 0 < found["cache",].kl < found["all",].kl < 1e-3
        True
    """
    check_plain("twin", model)
    if cache is not None and "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"twin: the forward of {type(model).__name__} takes no past_key_values: give cache=None")
    aliases = {id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()}
    own = copy.deepcopy(model, dict(aliases)).eval()
    with torch.random.fork_rng(devices=[]):  # the caller's generator is not advanced
        engine = engine_of(own, serving, cache=cache, router=router, accumulate=accumulate, dtype=dtype, exclude=exclude)
    return RolloutTwin(model, own, engine)


class RolloutTwin:
    """A model as a serving engine computes it: what `twin` returns.

    Attributes:
        model: The engine's model, with all components. Its parameters share memory with those of the trained model where they are equal.
        components: The components of the engine, by name, with their settings.

    Example:
        >>> import torch, qsim
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> twin = qsim.twin(LlamaForCausalLM(LlamaConfig(**sizes)), "nvfp4", cache="mxfp8")
        >>> twin.components["cache"], twin.cache()
        ('mxfp8', KVCache(keys=mxfp8, values=mxfp8, 0 tokens))
        >>> twin.model.generate(torch.arange(4)[None], past_key_values=twin.cache(), max_new_tokens=3).shape
        torch.Size([1, 7])
    """

    def __init__(self, trained: nn.Module, model: nn.Module, engine: ServingEngine) -> None:
        self.model = model
        self.components: Mapping[str, str] = engine.components(points_in(trained))
        self._trained, self._engine = trained, engine
        self._switch(self.components)

    def __repr__(self) -> str:
        return f"RolloutTwin({', '.join(f'{name}: {setting}' for name, setting in self.components.items())})"

    def cache(self) -> KVCache | None:
        """A new cache of the engine's, for `past_key_values`; `None` if it does not round."""
        from qsim.nn.kv_cache import KVCache

        return None if self._engine.cache is None else KVCache(self._engine.cache, config=getattr(self.model, "config", None))

    def gap(self, batch: Any) -> RolloutGap:
        """Measure how far the engine's probabilities are from the trainer's, with one component at a time, and with all.

        Both run in evaluation mode, and the trained model keeps its own points. A batch runs once for the trainer, once for all components,
        and twice for each. Where an accumulator takes rounded operands only, it adds only where weights and inputs are the engine's.

        Args:
            batch: Token ids of shape (sequences, tokens), or a dictionary of inputs with `input_ids`; `attention_mask` marks padding.

        Raises:
            ValueError: If there are no such tokens, or the model returns no logits.
        """
        tokens, mask = tokens_of(batch)
        takes_cache = "past_key_values" in inspect.signature(self._trained.forward).parameters
        trained = rollout(self._trained, batch, {"use_cache": False} if takes_cache else {})
        everything = set(self.components)
        try:
            whole = differences(trained, self._served(batch, everything, takes_cache), tokens, mask)
            records = []
            for name, setting in self.components.items():
                rest = everything - {name}
                without = differences(trained, self._served(batch, rest, takes_cache), tokens, mask).kl
                if name != "sums" or self._engine.adds_anything:
                    alone = vars(differences(trained, self._served(batch, {name}, takes_cache), tokens, mask))
                else:
                    alone = dict.fromkeys(("kl", "mean", "largest", "top", "experts"), float("nan"))
                records.append(ComponentGap(name, setting, without=without, **alone))
        finally:
            self._switch(everything)
        return RolloutGap((*records, ComponentGap("all", "", **vars(whole))), int((mask[:, 1:] & mask[:, :-1]).sum()))

    def _served(self, batch: Any, on: Collection[str], takes_cache: bool) -> Rollout:
        """Run the engine with some components."""
        self._switch(on)
        options = {"past_key_values": self.cache()} if "cache" in on else {"use_cache": False} if takes_cache else {}
        return rollout(self.model, batch, options)

    def _switch(self, on: Collection[str]) -> None:
        """Give the model some components of the engine, and the trained model's for the rest."""
        engine = self._engine
        trained = dict(self._trained.named_parameters())
        with torch.random.fork_rng(devices=[]):  # the caller's generator is not advanced
            revert(self.model)
            for name, parameter in self.model.named_parameters():
                source = engine.weights[name] if "weights" in on and name in engine.weights else trained[name].detach()
                parameter.data = source.to(engine.dtype if "dtype" in on and source.is_floating_point() else source.dtype)
            points = engine.points_with(on, points_in(self._trained))
            if points:
                convert(self.model, lambda name, module: points.get(name))
        # Histories of delayed scales, and what else changes in training.
        buffers, own = dict(self._trained.named_buffers()), dict(self.model.named_buffers())
        kept = {name: x for name, x in self.model.state_dict().items() if name in own and name in buffers}
        self.model.load_state_dict({name: buffers[name] for name, x in kept.items() if buffers[name].shape == x.shape}, strict=False)
