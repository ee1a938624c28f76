"""AdamW's kernel in Triton's interpreter, below the optimizers that use it. Weights are float16:
the interpreter cuts bfloat16 where a GPU rounds. Run by test_portable.py in its own process."""

import copy

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from flashtrain.tasks.training_task import TrainingTask
from flashtrain.training.gradient_clipping import clip_gradients
from flashtrain.training.master_weights import MasterWeights
from flashtrain.training.one_pass_adamw import OnePassAdamW
from flashtrain.training.optimizers import parameter_groups
from flashtrain_kernels.backends.portable import adamw

SIZES = (5000, 17, 40_000, 1, 64)
# Exact in float32, in which the kernel takes them, as torch does on CUDA.
RATES = {"lr": 2**-7, "betas": (0.875, 0.9375), "eps": 2**-27}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def parameters(dtype, sizes=SIZES):
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(n).to(dtype)) for n in sizes])


def groups(model):
    decayed, others = list(model)[:2], list(model)[2:]
    return [{"params": decayed, "weight_decay": 0.125}, {"params": others, "weight_decay": 0.0}]


def one_pass(model, **options):
    optimizer = OnePassAdamW(groups(model), **RATES, fused=True, **options)
    half = any(one.dtype == torch.float16 for one in model)
    return MasterWeights(optimizer) if half else optimizer


def draw(*models, without=()):
    """Give all models the same gradients."""
    for number, alike in enumerate(zip(*models, strict=True)):
        gradient = torch.randn_like(alike[0])
        for one in alike:
            one.grad = None if number in without else gradient.to(one.dtype, copy=True)


def states(optimizer):
    state = optimizer.state_dict()
    tensors = [x for one in state["state"].values() for x in one.values()]
    return tensors + state.get("masters", [])


def assert_same(ours, theirs):
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [None, 1.0, 0.3173])
def test_steps_are_adamws_in_float64_as_closely_as_torchs_in_float32(dtype, factor):
    model = parameters(dtype)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model).float()
    ours = one_pass(model)
    theirs = [
        torch.optim.AdamW(groups(one), **RATES, foreach=False, fused=False)
        for one in (exact, plain)
    ]
    for step in range(4):
        draw(model, exact, plain, without=(0,) if step == 1 else ())
        drawn = [None if one.grad is None else one.grad.clone() for one in model]
        if factor is not None:
            assert ours.scale_gradients(torch.tensor(factor))
            for one in (*exact, *plain):
                if one.grad is not None:
                    one.grad *= torch.tensor(factor)
        for one, before in zip(model, drawn, strict=True):  # scaled within the step alone
            assert before is None or torch.equal(one.grad, before)
        ours.step()
        for one in theirs:
            one.step()
    masters = {id(weight): master for weight, master in getattr(ours, "pairs", ())}
    for weight, wanted, other in zip(model, exact, plain, strict=True):
        master = masters.get(id(weight), weight)
        assert torch.equal(weight, master.to(dtype))
        of_exact, of_plain = theirs[0].state[wanted], theirs[1].state[other]
        bound = 3 * (other - wanted).abs().max() + 1e-6 * wanted.abs().max()
        assert (master - wanted).abs().max() <= bound
        assert ours.state[master]["step"] == of_exact["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            bound = 2 * (of_plain[name] - of_exact[name]).abs().max()
            got = ours.state[master][name]
            assert (got - of_exact[name]).abs().max() <= bound + 1e-6 * of_exact[name].abs().max()


def test_tensors_at_any_address_and_of_any_size_are_updated_within_their_bounds():
    for start, size in ((1, 5000), (4, 20_000), (3, 3), (8, 0)):
        buffers = [torch.rand(size + 16) for _ in range(4)]
        gradient, parameter, exp_avg, exp_avg_sq = (x[start : start + size] for x in buffers)
        before, step = [x.clone() for x in buffers], torch.ones(())
        update = adamw.Update(gradient, None, parameter, exp_avg, exp_avg_sq, step)
        assert update.kind()[-1] == (start % 4 == 0 and size % 4 == 0)
        if size:
            adamw.adamw_launch([update], None, 1e-2, 0.9, 0.95, 1e-8, 0.1).run()
        for now, then in zip(buffers, before, strict=True):
            changed = (now != then).nonzero()[:, 0]
            assert ((changed >= start) & (changed < start + size)).all()
        if size:
            torch.testing.assert_close(
                exp_avg, 0.9 * before[2][start : start + size] + 0.1 * gradient
            )


def test_a_state_of_torchs_continues_and_one_of_ours_continues_in_torchs():
    model = parameters(torch.float32)
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs = one_pass(model), torch.optim.AdamW(groups(other), **RATES, fused=True)
    draw(model, other)
    ours.step()
    theirs.step()
    assert theirs.state_dict()["param_groups"] == ours.state_dict()["param_groups"]
    for state, source in ((theirs.state_dict(), other), (ours.state_dict(), model)):
        twin.load_state_dict(source.state_dict())
        resumed = one_pass(twin)
        resumed.load_state_dict(copy.deepcopy(state))
        there = copy.deepcopy(source)
        theirs_again = torch.optim.AdamW(groups(there), **RATES, fused=True)
        theirs_again.load_state_dict(copy.deepcopy(state))
        draw(twin, there)
        resumed.step()
        theirs_again.step()
        for got, wanted in zip(states(resumed), states(theirs_again), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_resumed_steps_are_those_of_an_uninterrupted_run():
    model = parameters(torch.float16)
    ours = one_pass(model)
    draw(model)
    ours.step()
    again = copy.deepcopy(model)
    resumed = one_pass(again)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    draw(model, again)
    for weights, optimizer in ((model, ours), (again, resumed)):
        clip_gradients(weights, 0.5, optimizer=optimizer)
        optimizer.step()
    assert_same(states(resumed), states(ours))
    assert_same(again, model)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}, {"found_inf": 0.0}])
def test_what_the_kernel_lacks_is_torchs_step_of_clipped_gradients(options, monkeypatch):
    model = parameters(torch.float32)
    other = copy.deepcopy(model)
    found = options.pop("found_inf", None)
    ours = one_pass(model, **options)
    theirs = torch.optim.AdamW(groups(other), **RATES, fused=True, **options)
    draw(model, other)
    clip_gradients(model, 0.5, optimizer=ours)
    clip_gradients(other, 0.5)
    if found is not None:  # as GradScaler gives them within its step, which is after clipping
        for one in (ours, theirs):
            one.found_inf, one.grad_scale = torch.tensor(found), torch.tensor(8.0)
    ours.step()
    theirs.step()
    assert_same(model, other)
    assert_same(states(ours), states(theirs))


def test_shards_are_updated_as_whole_tensors(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = parameters(torch.float32)
        sharded = torch.nn.ParameterList(
            [torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)])) for x in model]
        )
        whole, ours = one_pass(model), one_pass(sharded)
        for _ in range(2):
            draw(model)
            for one, other in zip(sharded, model, strict=True):
                one.grad = distribute_tensor(other.grad.clone(), mesh, [Shard(0)])
            clip_gradients(model, 0.5, optimizer=whole)
            clip_gradients(sharded, 0.5, optimizer=ours)
            whole.step()
            ours.step()
        for one, other in zip(sharded, model, strict=True):
            assert isinstance(ours.state[one]["exp_avg"], DTensor)
            assert torch.equal(one.full_tensor(), other)
    finally:
        dist.destroy_process_group()


class Squares(TrainingTask):
    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()


def test_a_trainers_steps_clip_within_the_kernel(monkeypatch):
    batches = [torch.randn(4, 8) for _ in range(3)]
    model = torch.nn.Linear(8, 8)
    other = copy.deepcopy(model)
    accepted = []
    scale = OnePassAdamW.scale_gradients

    def spied(optimizer, factor):
        accepted.append(scale(optimizer, factor))
        return accepted[-1]

    monkeypatch.setattr(OnePassAdamW, "scale_gradients", spied)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Squares(model, gradient_clip=0.01), DataLoader(batches, batch_size=None))
    assert accepted == [True] * 3
    plain = torch.optim.AdamW(parameter_groups(other, 0.1), 6e-4, (0.9, 0.95), fused=True)
    for batch in batches:
        plain.zero_grad()
        other(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        plain.step()
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)
