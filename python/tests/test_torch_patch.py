"""patch(): small random models of transformers, patched and not, give the same losses and gradients."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from bookends import _library  # noqa: E402
from bookends.torch import linear_cross_entropy, patch, unpatch  # noqa: E402

DEVICE = _library.build()["device"]
SIZES = dict(vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32)
MODELS = {
    "Llama": lambda: transformers.LlamaConfig(**SIZES),
    "Mistral": lambda: transformers.MistralConfig(**SIZES),
    "Qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "Gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "Gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0),
    "GPT2": lambda: transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=32,
                                            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}
every_model = pytest.mark.parametrize("name", MODELS)


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation="eager")
    assert type(model).__name__.startswith(name)
    return model.to(DEVICE, dtype).train()


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, 101, (2, 9), device=DEVICE)
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def step(model, **arguments):
    model.zero_grad()
    ids, labels = batch()
    output = model(input_ids=ids, labels=labels, **arguments)
    output.loss.backward()
    return output, {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def relative(got, want):
    return (got - want).abs().max() / want.abs().max().clamp_min(1e-20)


@every_model
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)], ids=["fp32", "bf16"])
def test_losses_and_gradients(name, dtype, tolerance):
    model = make(name, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    want, gradients = step(model)
    assert patch(model) is model
    got, own = step(model)
    assert got.logits is None and type(got) is type(want) and got.loss.dtype == want.loss.dtype
    assert abs(got.loss - want.loss) <= tolerance * 0.1 * want.loss
    assert own.keys() == gradients.keys()
    for parameter in own:
        assert relative(own[parameter], gradients[parameter]) < tolerance, parameter


@every_model
def test_the_new_functions_are_called_and_undone(name, monkeypatch):
    calls = []
    from bookends.torch import _functional, _patch
    monkeypatch.setattr(_patch, "linear_cross_entropy",
                        lambda *a, **k: calls.append(k) or linear_cross_entropy(*a, **k))
    real = _functional.embedding
    monkeypatch.setattr(_functional, "embedding", lambda *a, **k: calls.append("embedding") or real(*a, **k))
    model = make(name)
    keys = list(model.state_dict())
    forward = type(model).forward
    patch(model, memory="50%", tune=False)
    step(model)
    assert calls.count("embedding") == (2 if name == "GPT2" else 1)
    options = calls[-1]
    assert options["memory"] == "50%" and options["tune"] is False
    assert options["softcap"] == (2.0 if name == "Gemma2" else 0.0)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="expected one that is not patched"):
        patch(model)
    calls.clear()
    ids, _ = batch()
    with torch.no_grad():
        logits = model(ids).logits
    assert calls.count("embedding") == len(calls)
    unpatch(model)
    calls.clear()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    step(model)
    assert calls == [] and model.forward.__func__ is forward
    with pytest.raises(ValueError, match="expected a patched one"):
        unpatch(model)


def test_arguments_of_trainers():
    """num_items_in_batch, shift_labels, labels by position, tuples, and logits_to_keep, which needs logits."""
    plain = make("Llama")
    model = patch(copy.deepcopy(plain))
    ids, labels = batch()
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    for arguments in (dict(num_items_in_batch=40), dict(num_items_in_batch=torch.tensor(40, device=DEVICE)),
                      dict(shift_labels=shifted.flip(1)), dict(output_hidden_states=True)):
        want, got = plain(ids, labels=labels, **arguments), model(ids, labels=labels, **arguments)
        assert abs(got.loss - want.loss) < 1e-5 * want.loss
        assert (got.hidden_states is None) == (want.hidden_states is None)
    loss = model(ids, labels=labels, return_dict=False)[0]
    assert torch.is_tensor(loss) and loss.shape == ()
    assert model(ids, labels=labels, logits_to_keep=9).logits is not None
    import inspect
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def test_generation():
    plain = make("Llama").eval()
    model = patch(copy.deepcopy(plain))
    ids, _ = batch()
    arguments = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **arguments), plain.generate(ids, **arguments))


def test_other_models_are_refused():
    with pytest.raises(NotImplementedError, match="model: expected a causal LM .* given Linear of type None"):
        patch(torch.nn.Linear(2, 2))
    config = transformers.OPTConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1, ffn_dim=64,
                                    num_attention_heads=4, word_embed_proj_dim=32)
    with pytest.raises(NotImplementedError, match="given OPTForCausalLM of type opt"):
        patch(transformers.OPTForCausalLM(config))
    model = make("Llama")
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(NotImplementedError, match="max_norm"):
        patch(model)
    with pytest.raises(ValueError, match="memory"):
        patch(make("Llama"), memory="lots")
