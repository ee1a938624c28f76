"""Steps whose launches are recorded and replayed, on an NVIDIA GPU: the same losses as
steps that are launched."""

from __future__ import annotations

import pytest
import torch

from flashtrain.models import Classifier, ClassifierConfig, Decoder, DecoderConfig
from flashtrain.tasks import LanguageModel, MaskedPixels, SequenceClassification

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 6  # three of them are warm-up and recording


def classifier_losses(cuda_graphs: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = ClassifierConfig(
        classes=2, length=1024, side=32, embed=64, heads=1, layers=2, grey_bins=256
    )
    task = SequenceClassification(
        Classifier(config).cuda(),
        masked=MaskedPixels(),
        compile=True,
        cuda_graphs=cuda_graphs,
        seed=1,
    )
    task.configure_model()
    images = torch.randint(
        0, 256, (STEPS, 8, 1024), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    ).cuda()
    labels = torch.tensor([0, 1] * 4, device="cuda")

    def loss(step: int) -> torch.Tensor:
        return task.total(task.batch_losses({"tokens": images[step], "labels": labels}, step=step))

    return trained(task, loss)


def language_model_losses(cuda_graphs: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.of_size("demo", "gpt2", vocab_size=50, context=256)).cuda()
    task = LanguageModel(model, compile=True, cuda_graphs=cuda_graphs)
    task.configure_model()
    tokens = torch.randint(
        0, 50, (STEPS, 4, 256), generator=torch.Generator().manual_seed(2)
    ).cuda()
    return trained(
        task,
        lambda step: task.batch_loss({"tokens": tokens[step], "labels": tokens[step].roll(-1, 1)}),
    )


def trained(task, loss) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.detach())
    return found


@pytest.mark.parametrize("losses", [classifier_losses, language_model_losses])
def test_replayed_steps_lose_what_launched_ones_do(losses) -> None:
    torch._dynamo.reset()
    launched = losses(False)
    torch._dynamo.reset()
    replayed = losses(True)
    assert launched[0] != launched[-1]
    # The sum of dQ over the keys is added up in any order.
    torch.testing.assert_close(torch.stack(replayed), torch.stack(launched), rtol=2e-3, atol=0)
