"""Training a classifier: it learns what can be learned, from labels, from masked pixels,
and draws the same again."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from quiet_trainer import FailsInStep3, quiet_trainer
from torch.utils.data import DataLoader

from flashtrain.errors import UserError
from flashtrain.models import Classifier, ClassifierConfig
from flashtrain.tasks import MaskedPixels, SequenceClassification
from flashtrain.training.optimizers import adamw

SIDE = 6
CONFIG = ClassifierConfig(
    classes=2, length=36, side=SIDE, embed=32, layers=1, heads=2, ffn=64, grey_bins=16
)


def images(count: int, seed: int) -> dict[str, torch.Tensor]:
    """Is there a bright pixel right below another? Dim noise around three bright pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 60, (count, SIDE, SIDE), generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        row, column = (int(torch.randint(0, SIDE - 1, (), generator=generator)) for _ in range(2))
        image[row, column] = 250
        if label:
            image[row + 1, column] = 250
        else:
            image[(row + 3) % SIDE, (column + 2) % SIDE] = 250
    return {"tokens": pixels.view(count, -1).to(torch.uint8), "labels": labels}


def batches(count: int, size: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [images(size, seed * 1000 + number) for number in range(count)]


def fit(task: SequenceClassification, steps: int, size: int = 64, **options) -> pl.Trainer:
    trainer = quiet_trainer(steps, **options)
    trainer.fit(
        task, DataLoader(batches(steps * trainer.accumulate_grad_batches, size), batch_size=None)
    )
    return trainer


def task(seed: int = 0, **options) -> SequenceClassification:
    torch.manual_seed(seed)
    return SequenceClassification(
        Classifier(CONFIG, "sdpa"),
        make_optimizer=lambda model: adamw(model, lr=5e-3, weight_decay=0.0),
        **options,
    )


def test_it_learns_an_easy_task_to_over_90_percent_of_unseen_images() -> None:
    learned = task(masked=MaskedPixels(weight=0.1))
    trainer = fit(learned, steps=150)
    found = trainer.validate(
        learned, DataLoader(batches(8, 64, seed=7), batch_size=None), verbose=False
    )[0]
    assert found["validation_accuracy"] > 0.9
    tested = trainer.test(
        learned, DataLoader(batches(8, 64, seed=7), batch_size=None), verbose=False
    )[0]
    assert tested["test_accuracy"] == pytest.approx(found["validation_accuracy"])


def test_the_accuracy_of_a_step_that_fails_is_not_counted() -> None:
    stopped, failed = task(), task()
    fit(stopped, 2, accumulate_grad_batches=2)
    with pytest.raises(ArithmeticError):
        fit(failed, 3, accumulate_grad_batches=2, callbacks=[FailsInStep3()])
    assert stopped.take_train_accuracy() == failed.take_train_accuracy()


def test_pre_training_on_masked_pixels_alone_needs_no_labels() -> None:
    learned = task(classification_weight=0.0, masked=MaskedPixels())
    fit(learned, steps=25)
    assert learned.last_loss < learned.first_loss
    gradients = [p.grad for p in learned.model.head.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_every_parameter_has_a_gradient_where_nothing_is_masked() -> None:
    # What DDP waits for: a model that was pre-trained on pixels goes on without them.
    learned = task()
    learned.total(learned.batch_losses(images(4, 0), step=0)).backward()
    assert all(parameter.grad is not None for parameter in learned.model.parameters())


def test_masks_are_drawn_from_seed_and_step_alone() -> None:
    first, again, batch = task(masked=MaskedPixels()), task(masked=MaskedPixels()), images(4, 0)
    with torch.no_grad():
        drawn = [
            float(one.batch_losses(batch, step=step).pixels)
            for one, step in ((first, 5), (again, 5), (first, 6))
        ]
        later = float(first.batch_losses(batch, step=5).pixels)
    assert drawn[0] == drawn[1] == later
    assert drawn[2] != drawn[0]


def test_the_accuracy_logged_is_the_mean_over_the_steps_micro_batches() -> None:
    shares = []

    class Kept(SequenceClassification):
        def batch_losses(self, batch, **options):
            losses = super().batch_losses(batch, **options)
            shares.append(float(losses.correct))
            return losses

    torch.manual_seed(0)
    learner = Kept(
        Classifier(CONFIG, "sdpa"),
        make_optimizer=lambda model: adamw(model, lr=5e-3, weight_decay=0.0),
    )
    trainer = fit(learner, 2, size=8, accumulate_grad_batches=3, log_every_n_steps=1)
    assert float(trainer.callback_metrics["train_accuracy"]) == pytest.approx(
        sum(shares[3:]) / 3, abs=1e-6
    )
    assert learner.take_train_accuracy() == pytest.approx(sum(shares) / 6, abs=1e-6)
    assert learner.take_train_accuracy() is None


def test_turning_is_for_training_only() -> None:
    seen = []

    def spy(tokens, generator):
        seen.append(len(tokens))
        return tokens

    learned = task(augment=[spy])
    trainer = fit(learned, steps=2, size=4)
    trainer.validate(learned, DataLoader(batches(1, 4), batch_size=None), verbose=False)
    assert seen == [4, 4]


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(UserError, match="classification_weight=0"):
        task(classification_weight=0.0)


def test_some_pixels_are_read_in_training_and_validation_and_all_in_tests() -> None:
    module = task(training_pixels=20)
    read: list[int] = []
    hidden = module.model.hidden

    def counted(tokens, *arguments, **named):
        read.append(tokens.shape[1])
        return hidden(tokens, *arguments, **named)

    module.model.hidden = counted
    trainer = fit(module, 2)
    trainer.validate(module, DataLoader(batches(1, 8), batch_size=None), verbose=False)
    trainer.test(module, DataLoader(batches(1, 8), batch_size=None), verbose=False)
    assert read == [20, 20, 20, 36]
