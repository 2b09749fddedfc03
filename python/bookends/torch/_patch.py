"""patch(): the embeddings and the loss of a causal LM of Hugging Face's transformers become those of this package."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Union

import torch

from ._functional import Embedding, linear_cross_entropy, parse_memory, unsupported

# Models whose logits are lm_head(hidden), with config.final_logit_softcapping where there is one, and whose loss is
# transformers' ForCausalLMLoss.
MODEL_TYPES = ("gemma", "gemma2", "gpt2", "llama", "mistral", "qwen2", "qwen3")


def patched_forward(model: Any, memory: Union[str, int], tune: bool) -> Any:
    """A forward() that computes the loss from the hidden states, without logits, if it is called with labels."""
    original = model.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named).arguments
        given = {**bound, **bound.pop("kwargs", {})}
        labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
        if labels is None or not isinstance(keep, int) or keep != 0:
            return original(*arguments, **named)
        as_tuple = given.pop("return_dict", True) is False
        of_loss = {name: given.get(name) for name in ("num_items_in_batch", "shift_labels")}
        ignore_index = given.get("ignore_index", -100)
        outputs = model.base_model(**given)
        hidden = outputs.last_hidden_state
        targets = of_loss["shift_labels"]
        if targets is None:  # position t predicts token t + 1
            targets = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        items = of_loss["num_items_in_batch"]
        head = model.get_output_embeddings()
        loss = linear_cross_entropy(hidden, head.weight, targets.to(hidden.device).view(hidden.shape[:-1]), head.bias,
                                    ignore_index=ignore_index, num_items_in_batch=items, memory=memory, tune=tune,
                                    softcap=getattr(model.config, "final_logit_softcapping", None) or 0.0)
        fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        result = output_class(model)(loss=loss, **fields)
        return result.to_tuple() if as_tuple else result

    return forward


def output_class(model: Any) -> Any:
    """The class of a model's outputs."""
    from transformers import modeling_outputs
    if model.config.model_type == "gpt2":
        return modeling_outputs.CausalLMOutputWithCrossAttentions
    return modeling_outputs.CausalLMOutputWithPast


def is_patched(model: Any) -> bool:
    """Whether patch() has changed the model."""
    return "_bookends_classes" in model.__dict__


def patch(model: Any, *, memory: Union[str, int] = "25%", tune: bool = True) -> Any:
    """Changes a causal LM of transformers in place: its nn.Embedding modules become Embedding, and forward() with
    labels computes the loss by linear_cross_entropy() with these arguments. Its `logits` are then None; without labels
    they are as before. Weights and state_dict stay. Returns the model; unpatch() undoes it.

    Supports LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, GemmaForCausalLM,
    Gemma2ForCausalLM and GPT2LMHeadModel; another model raises NotImplementedError."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in MODEL_TYPES or not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise NotImplementedError(f"model: expected a causal LM of transformers of type {', '.join(MODEL_TYPES)}, "
                                  f"given {type(model).__name__} of type {kind}")
    if is_patched(model):
        raise ValueError("model: expected one that is not patched, given a patched one")
    parse_memory(memory)
    classes: list[tuple[Any, Any]] = [(module, type(module)) for module in model.modules()
                                       if isinstance(module, torch.nn.Embedding)]
    for module, _ in classes:
        unsupported(max_norm=module.max_norm, scale_grad_by_freq=module.scale_grad_by_freq)
    forward = patched_forward(model, memory, tune)
    for module, old in classes:
        module.__class__ = embedding_class(old)
    model.__dict__["_bookends_classes"] = classes
    model.forward = forward
    return model


@functools.lru_cache(maxsize=None)
def embedding_class(old: Any) -> Any:
    """A class of embeddings that uses embedding(); a subclass of torch's inherits from both."""
    return Embedding if old is torch.nn.Embedding else type(old.__name__, (old, Embedding), {})


def unpatch(model: Any) -> Any:
    """Undoes patch(). Returns the model."""
    if not is_patched(model):
        raise ValueError("model: expected a patched one, given one that is not")
    for module, old in model.__dict__.pop("_bookends_classes"):
        module.__class__ = old
    del model.forward
    return model
