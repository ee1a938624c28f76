"""Context parallelism in the settings: what asks for it, whose samples divide over
what, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
from pytorch_lightning.plugins.environments import SLURMEnvironment
from quick_settings import settings_of

from flashtrain.command.compose import compose_settings
from flashtrain.distributed.context.layouts import LAYOUTS
from flashtrain.distributed.context.methods import AUTO, METHODS
from flashtrain.distributed.context.strategy import ContextParallelStrategy
from flashtrain.distributed.strategies import make_strategy
from flashtrain.errors import UserError
from flashtrain.run.fitting import strategy_options
from flashtrain.settings import options


def test_the_names_are_those_that_are_built():
    assert (AUTO, *METHODS) == get_args(options.ContextMethod)
    assert tuple(LAYOUTS) == get_args(options.ContextLayout)


@pytest.mark.parametrize(
    ("words", "strategy", "degree", "data_ranks"),
    [
        ((), "auto", 1, 1),
        (("trainer.devices=8",), "auto", 1, 8),
        (("trainer.devices=8", "context_parallel=1", "trainer.strategy=ddp"), "ddp", 1, 8),
        (("trainer.devices=8", "context_parallel=4"), "context_parallel", 4, 2),
        (
            ("trainer.devices=4", "trainer.nodes=2", "trainer.strategy=context_parallel"),
            "context_parallel",
            8,
            1,
        ),
        (
            ("trainer.devices=8", "trainer.strategy=context_parallel", "context_parallel=1"),
            "context_parallel",
            1,
            8,
        ),
    ],
)
def test_a_degree_above_one_or_the_strategys_name_asks_for_it(words, strategy, degree, data_ranks):
    settings = settings_of(*words)
    assert (settings.strategy, settings.context_degree, settings.data_ranks) == (
        strategy,
        degree,
        data_ranks,
    )
    assert settings.shards_weights == (strategy == "context_parallel")


def test_samples_of_a_step_divide_over_groups_of_devices():
    words = ("context=1024", "trainer.devices=8", "context_parallel=4")
    settings_of(*words, "trainer.tokens_per_step=2048").check_step()
    with pytest.raises(
        UserError, match=r"3 samples .* over 2 groups of 4 devices\. .* a multiple of 2048"
    ):
        settings_of(*words, "trainer.tokens_per_step=3072").check_step()
    with pytest.raises(
        UserError, match=r"micro_batch=2 does not divide the 3 samples a group of devices takes"
    ):
        settings_of(*words, "trainer.tokens_per_step=6144", "trainer.micro_batch=2").check_step()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("context_parallel=0",), "context_parallel=0 must be at least 1"),
        (
            ("context_parallel=2",),
            r"does not divide 1 device.*Use context_parallel=1, or trainer.devices=2",
        ),
        (
            ("trainer.devices=8", "context_parallel=3"),
            r"does not divide 8 device.*Use context_parallel=1, 2, 4",
        ),
        (
            ("trainer.devices=2", "context_parallel=2", "trainer.strategy=fsdp"),
            "Use trainer.strategy=context_parallel",
        ),
        (
            ("trainer.strategy=context_parallel", "optimizer=lamb"),
            "lamb cannot train sharded weights",
        ),
        (
            ("trainer.strategy=fsdp", "hardware.precision=64-true"),
            "trainer.strategy=fsdp shards them",
        ),
        (
            ("context_parallel=2", "hardware.precision=64-true"),
            "trainer.strategy=context_parallel shards them",
        ),
        (("trainer.strategy=context_parallel", "attention=standard"), "Use attention=flash"),
        (
            ("trainer.strategy=context_parallel", "trainer.cuda_graphs=true"),
            "Use trainer.cuda_graphs=false",
        ),
        (
            ("trainer.strategy=context_parallel", "mode=lengths", "lengths.contexts=[32]"),
            "trains several contexts",
        ),
        (("trainer.devices=2", "trainer.context_parallel_method=ring"), "Set context_parallel=2"),
        (
            ("trainer.devices=2", "trainer.context_parallel_layout=zigzag"),
            r"context_parallel_layout=zigzag .* Set context_parallel=2",
        ),
        (
            ("trainer.devices=2", "trainer.context_parallel_groups=planned"),
            r"context_parallel_groups=planned .* Set context_parallel=2",
        ),
        (
            ("context_parallel=2", "trainer.devices=2", "trainer.context_parallel_groups=planned"),
            "context_parallel_groups=planned .* Set data.document_mask=true",
        ),
        (
            ("trainer.context_parallel_method=rings",),
            r"unknown trainer.context_parallel_method 'rings'\. Did you mean 'ring'",
        ),
        (
            ("trainer.context_parallel_layout=zigzg",),
            "unknown trainer.context_parallel_layout 'zigzg'",
        ),
        (("trainer.timeout_seconds=0",), "trainer.timeout_seconds=0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, message):
    with pytest.raises(UserError, match=message) as refused:
        settings_of(*words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("recipe", ["bert", "bert-finetune", "lra-pathfinder"])
@pytest.mark.parametrize(
    "word", ["trainer.strategy=context_parallel", "trainer.strategy=fsdp", "mode=generate"]
)
def test_only_language_models_share_sequences_are_sharded_and_write_text(recipe, word):
    with pytest.raises(UserError, match=f"{word}.* recipe={recipe} "):
        compose_settings([f"recipe={recipe}", word])


def test_the_strategy_is_made_as_the_settings_say():
    words = (
        "trainer.devices=4",
        "context_parallel=2",
        "trainer.context_parallel_method=ring",
        "trainer.context_parallel_layout=zigzag",
    )
    made = make_strategy(
        "context_parallel",
        **strategy_options(settings_of(*words, "trainer.timeout_seconds=7200"), Path("run")),
    )
    assert isinstance(made, ContextParallelStrategy)
    assert (made.context_parallel_size, made.method, made.layout) == (2, "ring", "zigzag")
    assert made.groups == "fixed"
    assert made.watchdog.timeout == 7200
    assert made._timeout.total_seconds() > 7200  # the watchdog speaks before a collective gives up
    assert made.documents is None
    planned = "data.document_mask=true", "trainer.context_parallel_groups=planned"
    masked = strategy_options(
        settings_of(*words, *planned, "trainer.timeout_seconds=null"), Path("run")
    )
    made = make_strategy("context_parallel", **masked)
    assert (made.documents, made.groups) == ("documents", "planned")
    assert make_strategy("context_parallel", **masked).watchdog.timeout == math.inf
    assert strategy_options(settings_of("trainer.strategy=ddp"), Path("run")) == {}


def test_slurm_starts_the_ranks_as_for_every_strategy(monkeypatch):
    import pytorch_lightning as pl

    variables = {
        "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "host",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = make_strategy(
        "context_parallel",
        **strategy_options(settings_of("trainer.devices=4", "context_parallel=2"), Path("run")),
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=4, strategy=made, logger=False, enable_checkpointing=False
    )
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank()) == (4, 0)
