"""Libraries that train a model: Trainer, accelerate, PEFT, Fabric, diffusers; only the parameters are ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from library_checks import check_equal, check_gradients, check_on_mesh, check_states
from library_models import MARKS, both, gpt2, llama, put, seeded, share, tokens

pytestmark = MARKS

ROWS = [{"input_ids": row, "labels": row} for row in tokens(24, seed=5)]


# Hugging Face's Trainer, with the arguments that it has by default


def trainer_of(model: Any, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, **options)
    return Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:10])


@pytest.mark.parametrize("layout", ["data", "tensor", "sharded", "uneven"])
def test_a_trainer_trains_and_evaluates_as_with_the_dense_model(layout, tmp_path):
    model, ours = both(llama(), layout)
    expected = trainer_of(model, tmp_path / "dense", max_steps=4)
    found = trainer_of(ours, tmp_path / "ours", max_steps=4)
    assert found.train().training_loss == pytest.approx(expected.train().training_loss, rel=1e-5)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-5)
    check_states(ours.state_dict(), model.state_dict())
    check_on_mesh(ours)


def test_a_trainer_predicts_what_the_dense_model_predicts(tmp_path):
    model, ours = both(gpt2(), "tensor")
    expected = trainer_of(model, tmp_path).predict(ROWS[:10])
    found = trainer_of(ours, tmp_path).predict(ROWS[:10])
    assert type(found.predictions) is type(expected.predictions)
    check_equal(*map(torch.as_tensor, (_logits(found), _logits(expected))))


def _logits(predicted: Any) -> Any:
    found = predicted.predictions
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("layout", ["tensor", "uneven"])
def test_training_that_is_saved_and_resumed_ends_as_training_in_one_go(layout, tmp_path):
    options = {"max_steps": 4, "save_steps": 2}
    model, ours = both(llama(), layout)
    again = copy.deepcopy(ours)
    trainer_of(model, tmp_path / "dense", **options).train()
    trainer_of(ours, tmp_path / "ours", **options).train()
    resumed = trainer_of(again, tmp_path / "ours", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    check_states(again.state_dict(), ours.state_dict(), 1e-6)
    check_states(again.state_dict(), model.state_dict())


def test_a_checkpoint_of_a_trainer_is_read_by_a_dense_model(tmp_path):
    ours = put(llama(), "sharded")
    trainer = trainer_of(ours, tmp_path, max_steps=2)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    check_states(type(ours).from_pretrained(tmp_path / "saved").state_dict(), ours.state_dict(), 0.0)


def test_a_trainer_with_accumulation_clipping_and_a_schedule_trains_as_with_the_dense_model(tmp_path):
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "lr_scheduler_type": "cosine"}
    model, ours = both(gpt2(), "uneven")
    trainer_of(model, tmp_path / "dense", per_device_train_batch_size=4, **options).train()
    trainer_of(ours, tmp_path / "ours", per_device_train_batch_size=4, **options).train()
    check_states(ours.state_dict(), model.state_dict())


# accelerate


def batches(layout: str | None, rows: int = 8) -> list[Any]:
    found = [tokens(rows, seed=each) for each in range(3)]
    return found if layout is None else [share(each, layout) for each in found]


def loop(accelerator: Any, model: Any, optimizer: Any, given: Any) -> list[float]:
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def accelerated(model: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


@pytest.mark.parametrize("layout", ["tensor", "uneven"])
def test_a_loop_of_accelerate_trains_as_with_the_dense_model(layout):
    model, ours = both(llama(), layout)
    expected = loop(*accelerated(model), batches(None))
    assert loop(*accelerated(ours), batches(layout)) == pytest.approx(expected, rel=1e-5)
    check_states(ours.state_dict(), model.state_dict())
    check_on_mesh(ours)


def test_a_data_loader_that_accelerate_prepared_feeds_the_model(tmp_path):
    model, ours = both(llama(), "tensor")
    for each in (model, ours):
        accelerator, prepared, optimizer = accelerated(each)
        loader = accelerator.prepare(DataLoader(tokens(16), batch_size=8))
        loop(accelerator, prepared, optimizer, loader)
    check_states(ours.state_dict(), model.state_dict())


@pytest.mark.parametrize("layout", ["tensor", "uneven"])
def test_a_state_that_accelerate_saved_is_the_one_it_loads(layout, tmp_path):
    ours = put(llama(), layout)
    accelerator, model, optimizer = accelerated(ours)
    loop(accelerator, model, optimizer, batches(layout))
    accelerator.save_state(str(tmp_path))
    expected = loop(accelerator, model, optimizer, batches(layout))
    accelerator.load_state(str(tmp_path))
    assert loop(accelerator, model, optimizer, batches(layout)) == pytest.approx(expected, rel=1e-6)
    check_on_mesh(ours)


# PEFT


def adapted(model: Any, seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    with seeded(seed):
        return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]))


def both_adapted(layout: str) -> tuple[Any, Any]:
    """Adapters made by the library, dense; then all of it goes to the mesh."""
    return both(adapted(llama()), layout)


def train(model: Any, given: list[Any]) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for batch in given:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("layout", ["tensor", "uneven"])
def test_an_adapter_is_trained_as_with_the_dense_model_and_nothing_else_is(layout):
    model, ours = both_adapted(layout)
    before = copy.deepcopy(dict(model.named_parameters()))
    train(model, batches(None))
    train(ours, batches(layout))
    check_gradients(ours, model)
    check_states(ours.state_dict(), model.state_dict())
    for name, p in ours.named_parameters():
        if "lora" not in name:
            check_equal(p, before[name], 0.0)


def test_an_adapter_made_on_a_model_that_is_on_a_mesh_can_be_trained():
    """The library makes the adapter's parameters itself; the base stays on the mesh."""
    model, ours = llama(), put(llama(), "tensor")
    model, ours = adapted(model), adapted(ours)
    for name, p in ours.named_parameters():
        if "lora" in name:
            with torch.no_grad():
                p.copy_(dict(model.named_parameters())[name])
    train(model, batches(None))
    train(ours, batches("tensor"))
    check_states(ours.state_dict(), model.state_dict())


def test_an_adapter_that_is_saved_is_loaded_onto_a_dense_model(tmp_path):
    from peft import PeftModel

    _, ours = both_adapted("tensor")
    train(ours, batches("tensor"))
    ours.save_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(llama(), str(tmp_path))
    check_states(loaded.state_dict(), ours.state_dict(), 1e-6)


@pytest.mark.parametrize("layout", ["tensor", "sharded", "uneven"])
def test_an_adapter_that_is_merged_gives_the_weights_of_dense(layout):
    model, ours = both_adapted(layout)
    train(model, batches(None))
    train(ours, batches(layout))
    merged, expected = ours.merge_and_unload(), model.merge_and_unload()
    check_states(merged.state_dict(), expected.state_dict())
    check_equal(merged(tokens()).logits, expected(tokens()).logits, 1e-4)


# Lightning Fabric


@pytest.mark.parametrize("layout", ["tensor", "uneven"])
def test_a_loop_of_fabric_trains_as_with_the_dense_model(layout):
    model, ours = both(gpt2(), layout)
    expected = fabric_loop(model, batches(None))
    assert fabric_loop(ours, batches(layout)) == pytest.approx(expected, rel=1e-5)
    check_states(ours.state_dict(), model.state_dict())
    check_on_mesh(ours)


def fabric_loop(model: Any, given: list[Any]) -> list[float]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    # the loop of dense, to the bit: gradients of the bias of keys are rounding, so that any other bit makes them others
    prepared, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = prepared(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(prepared, optimizer, max_norm=0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_what_fabric_saved_it_loads(tmp_path):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, ours = both(gpt2(), "tensor")
    state = {"model": fabric.setup(ours), "step": 3}
    fabric.save(tmp_path / "state.ckpt", state)
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(0)
    fabric.load(tmp_path / "state.ckpt", state)
    check_states(ours.state_dict(), model.state_dict(), 0.0)


# diffusers


def unet() -> Any:
    from diffusers import UNet2DModel

    with seeded():
        return UNet2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )


@pytest.mark.parametrize("layout", ["data", "sharded", "uneven"])
def test_a_step_of_a_diffusion_model_is_that_of_the_dense_one(layout):
    from diffusers import DDPMScheduler

    model, ours = both(unet(), layout)
    scheduler, generator = DDPMScheduler(num_train_timesteps=10), torch.Generator().manual_seed(0)
    images, noise = (torch.randn(4, 3, 8, 8, generator=generator) for _ in range(2))
    times = torch.tensor([1, 3, 5, 9])
    for each, put_batch in ((model, lambda value: value), (ours, lambda value: share(value, layout))):
        noisy = scheduler.add_noise(put_batch(images), put_batch(noise), put_batch(times))
        loss = torch.nn.functional.mse_loss(each(noisy, put_batch(times)).sample, put_batch(noise))
        loss.backward()
    check_gradients(ours, model)


def test_a_denoising_step_gives_the_image_of_dense():
    from diffusers import DDIMScheduler

    model, ours = both(unet(), "sharded")
    found = []
    for each in (model, ours):
        scheduler = DDIMScheduler(num_train_timesteps=10)
        scheduler.set_timesteps(3)
        image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for time in scheduler.timesteps:
                image = scheduler.step(each(image, time).sample, time, image).prev_sample
        found.append(image)
    check_equal(found[1], found[0], 1e-4)


def test_a_diffusion_model_that_is_saved_is_the_dense_one_when_it_is_loaded(tmp_path):
    model, ours = both(unet(), "uneven")
    ours.save_pretrained(tmp_path)
    check_states(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict(), 0.0)
