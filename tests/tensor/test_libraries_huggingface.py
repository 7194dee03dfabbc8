"""Hugging Face models whose parameters are on a mesh: forward, generation, files; all else is the library's code."""

from __future__ import annotations

import pytest
import torch

import meshloom as loom
from library_checks import check_equal, check_gradients, check_on_mesh, check_states, dense
from library_models import (
    GRID,
    IS_DENSE,
    LAYOUTS,
    MARKS,
    MODELS,
    TOKENS,
    both,
    example,
    llama,
    prompt,
    put,
    seeded,
    share,
    tokens,
)

pytestmark = MARKS

# Each model on two meshes and in two kinds of placement; together all four kinds.
PAIRS = [
    (name, layout)
    for name, layouts in {
        "llama": LAYOUTS,
        "gpt2": ("tensor", "uneven"),
        "whisper": ("tensor", "uneven"),
        "mamba": ("data", "sharded"),
    }.items()
    for layout in layouts
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_default_forward_gives_the_loss_the_logits_and_the_gradients_of_dense(name, layout):
    model, ours = both(MODELS[name](), layout)
    batch = example(name)
    expected = model(**batch)
    found = ours(**{key: share(value, layout) for key, value in batch.items()})
    check_equal(found.loss, expected.loss)
    check_equal(found.logits, expected.logits)
    expected.loss.backward()
    found.loss.backward()
    check_gradients(ours, model)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_greedy_generation_gives_the_tokens_of_dense(name, layout):
    model, ours = both(MODELS[name](), layout)
    given, options = prompt(name), {"max_new_tokens": 5, "do_sample": False}
    check_equal(ours.generate(**given, **options), model.generate(**given, **options))


def test_a_prompt_on_the_mesh_is_continued_as_one_that_is_not():
    model, ours = both(llama(), "tensor")
    prompts = tokens(4)
    found = ours.generate(share(prompts, "tensor"), max_new_tokens=5, do_sample=False)
    check_equal(found, model.generate(prompts, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize(("name", "layout"), [("llama", "tensor"), ("gpt2", "uneven"), ("whisper", "sharded")])
def test_generation_with_beams_gives_the_tokens_of_dense(name, layout):
    model, ours = both(MODELS[name](), layout)
    given, options = prompt(name, 2), {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    check_equal(ours.generate(**given, **options), model.generate(**given, **options))


@pytest.mark.parametrize(("name", "layout"), [("llama", "tensor"), ("llama", "uneven"), ("gpt2", "sharded")])
def test_generation_with_a_static_cache_gives_the_tokens_of_dense(name, layout):
    model, ours = both(MODELS[name](), layout)
    given = prompt(name)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    check_equal(ours.generate(**given, **options), model.generate(**given, **options))


@pytest.mark.parametrize("name", MODELS)
def test_sampling_with_a_seed_gives_the_same_tokens_on_every_mesh(name):
    given, found = prompt(name), []
    for layout in ("data", "tensor", "uneven"):
        with seeded(3):
            ours = put(MODELS[name](), layout)
            found.append(dense(ours.generate(**given, max_new_tokens=5, do_sample=True, top_k=20, temperature=1.5)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_sampling_with_another_seed_gives_other_tokens():
    ours, found = put(llama(), "tensor"), []
    for seed in (3, 4):
        with seeded(seed):
            found.append(dense(ours.generate(tokens(4), max_new_tokens=5, do_sample=True, temperature=1.5)))
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_saved_model_is_the_dense_one_when_it_is_loaded(name, layout, tmp_path):
    model, ours = both(MODELS[name](), layout)
    ours.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    check_states(loaded.state_dict(), model.state_dict(), 0.0)
    assert all(type(p) is torch.nn.Parameter for p in loaded.parameters())


def test_a_model_saved_in_several_files_is_the_dense_one_when_it_is_loaded(tmp_path):
    model, ours = both(llama(), "uneven")
    ours.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_states(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict(), 0.0)


def test_weights_that_are_tied_are_written_once_and_loaded_tied(tmp_path):
    from safetensors import safe_open

    put(llama(), "tensor").save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = type(llama()).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize(("rows", "layout"), [(TOKENS + 5, "tensor"), (TOKENS + 5, "uneven"), (TOKENS - 7, "sharded")])
def test_a_vocabulary_of_another_size_keeps_the_rows_it_had(rows, layout):
    model, ours = both(llama(), layout)
    before = model.get_input_embeddings().weight.detach().clone()
    with seeded():
        model.resize_token_embeddings(rows, mean_resizing=False)
    with seeded():
        ours.resize_token_embeddings(rows, mean_resizing=False)
    found = dense(ours.get_input_embeddings().weight)
    kept = min(rows, TOKENS)
    assert tuple(found.shape) == (rows, before.shape[1])
    assert torch.equal(found[:kept], before[:kept])
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight
    given = tokens().clamp(max=kept - 1)
    check_equal(ours(given).logits[..., :kept], model(given).logits[..., :kept])


def test_a_vocabulary_that_has_grown_by_its_mean_is_the_one_of_dense():
    model, ours = both(llama(), "tensor")
    with seeded():
        model.resize_token_embeddings(TOKENS + 4)
    with seeded():
        ours.resize_token_embeddings(TOKENS + 4)
    # the rows that are new are drawn around the mean, with next to no variance
    check_equal(ours.get_input_embeddings().weight, model.get_input_embeddings().weight, 1e-2)


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_forward_on_meta_has_the_shapes_of_the_one_with_data(name, layout):
    if IS_DENSE and name == "gpt2":
        pytest.skip("it asks for padding among its tokens, and dense torch has no values of theirs on meta")
    model = MODELS[name]()
    batch = example(name)
    expected = model(**batch)
    on_meta = put(model, layout, device="meta").to("meta")
    found = on_meta(**{key: share(_like(value), layout) for key, value in batch.items()})
    assert found.logits.is_meta and tuple(found.logits.shape) == tuple(expected.logits.shape)
    assert found.loss.is_meta and tuple(found.loss.shape) == ()


def _like(value: torch.Tensor) -> torch.Tensor:
    return value.to("meta") if value.is_floating_point() or IS_DENSE else value


@pytest.mark.skipif(IS_DENSE, reason="dense tensors have no plans")
@pytest.mark.parametrize(("name", "layout"), [("llama", "tensor"), ("gpt2", "uneven"), ("whisper", "tensor")])
def test_explain_tells_what_a_forward_moves_and_changes_nothing(name, layout):
    ours = put(MODELS[name](), layout)
    batch = {key: share(value, layout) for key, value in example(name).items()}
    with loom.record() as log:
        ours(**batch)
    told = loom.explain(lambda: ours(**batch))
    planned = [(event.kind, event.axis) for event in told.events if event.call != "bool"]
    assert planned == [(event.kind, event.axis) for event in log if event.call != "bool"] != []
    assert all(p.grad is None for p in ours.parameters())


def test_a_causal_mask_with_padding_gives_the_logits_of_dense():
    model, ours = both(llama(), "tensor")
    given, mask = tokens(), torch.ones(8, 6, dtype=torch.long)
    mask[0, :2] = mask[3, :4] = 0
    expected = model(given, attention_mask=mask).logits
    found = ours(share(given, "tensor"), attention_mask=share(mask, "tensor")).logits
    check_equal(found[mask.bool()], expected[mask.bool()])


def test_training_with_gradient_checkpointing_gives_the_gradients_of_dense():
    model, ours = both(llama(), "tensor")
    for each, batch in ((model, tokens()), (ours, share(tokens(), "tensor"))):
        each.train()
        each.gradient_checkpointing_enable()
        each(batch, labels=batch).loss.backward()
    check_gradients(ours, model)


def test_the_parameters_of_a_model_stay_on_the_mesh():
    ours = put(llama(), "tensor")
    ours.eval().train().requires_grad_(False).requires_grad_(True)
    ours.to(torch.float64).to(torch.float32)
    check_on_mesh(ours)
    assert IS_DENSE or {p.mesh for p in ours.parameters()} == {GRID}
