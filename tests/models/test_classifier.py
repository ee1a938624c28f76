"""The sequence classifier: what it reads, what padding and patterns change, and what it
learns from masked pixels.

B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flashtrain.errors import UserError
from flashtrain.models.block_pattern import near_tiles, tile_of, tile_order
from flashtrain.models.classifier import Classifier
from flashtrain.models.classifier_config import ClassifierConfig
from flashtrain.models.pixel_selection import pixels_to_mask, pixels_to_read
from flashtrain.models.positions import AxialRotaryPositions
from flashtrain.models.weight_transfer import carry_weights

TINY = {"embed": 32, "layers": 2, "heads": 2, "ffn": 64}
TOKENS = ClassifierConfig(
    classes=3, length=40, vocab_size=20, inputs="tokens", positions="rotary", **TINY
)
PREDICTED = replace(TOKENS, grey_bins=20)
PIXELS = ClassifierConfig(classes=2, length=64, side=8, grey_bins=16, **TINY)


def build(config: ClassifierConfig, attention: str = "flash", seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(config, attention).double()


def tokens(rows: int = 4, length: int = 40, below: int = 20) -> torch.Tensor:
    return torch.randint(1, below, (rows, length), generator=torch.Generator().manual_seed(1))


def pixels(rows: int = 3, side: int = 8) -> torch.Tensor:
    drawn = torch.randint(0, 256, (rows, side * side), generator=torch.Generator().manual_seed(2))
    return drawn.to(torch.uint8)


@pytest.mark.parametrize("attention", ["flash", "sdpa", "standard"])
@pytest.mark.parametrize("pooling", ["mean", "max", "attention"])
def test_a_padded_row_is_classified_as_it_is_alone(attention, pooling) -> None:
    model = build(replace(TOKENS, pooling=pooling), attention)
    given, lengths = tokens(), torch.tensor([40, 1, 17, 33])
    together = model(given, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model(given[row : row + 1, :length])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-10, rtol=0)


def test_two_towers_are_one_encoder_and_see_the_order_of_the_pair() -> None:
    model = build(replace(TOKENS, towers=2))
    pair, lengths = tokens().view(2, 2, 40), torch.tensor([[40, 5], [17, 33]])
    assert not torch.allclose(model(pair, lengths), model(pair.flip(1), lengths.flip(1)))


def test_all_three_attentions_give_the_same_logits() -> None:
    expected = build(PIXELS, "standard")(pixels())
    for attention in ("flash", "sdpa"):
        torch.testing.assert_close(build(PIXELS, attention)(pixels()), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "pattern", ["butterfly", "local-global", "butterfly-local-global", "tiles", "butterfly-tiles"]
)
def test_a_block_pattern_hides_the_same_pairs_in_every_attention_forward_and_backward(
    pattern,
) -> None:
    config = ClassifierConfig(
        classes=2, length=256, side=16, pattern=pattern, pattern_block=16, **TINY
    )
    found = []
    for attention in ("flash", "sdpa", "standard"):
        model = build(config, attention)
        logits = model(pixels(side=16))
        logits.sum().backward()
        found.append((logits.detach(), model.blocks[0].attention.qkv.weight.grad))
    assert 0 < model.pattern.density < 0.8
    for logits, gradient in found[1:]:
        torch.testing.assert_close(logits, found[0][0], atol=1e-10, rtol=0)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-10, rtol=0)
    dense = build(replace(config, pattern="dense"))
    assert not torch.allclose(dense(pixels(side=16)), found[0][0])
    assert dense.flops_per_sample() > model.flops_per_sample()


def test_pixels_taken_tile_by_tile_are_the_same_pixels() -> None:
    """Where every tile is near, only the order of the tokens is another, which no loss
    and no gradient shows."""
    dense = ClassifierConfig(classes=2, length=256, side=16, grey_bins=16, **TINY)
    images, labels = pixels(side=16), torch.zeros(len(pixels(side=16)), dtype=torch.int64)
    masked = pixels_to_mask(1, 256, 0.3, torch.Generator().manual_seed(0))
    found = []
    for config in (dense, replace(dense, pattern="tiles", pattern_block=32, pattern_local=4)):
        model = build(config)
        losses = model.losses(images, labels, masked=masked)
        (losses.classification + losses.pixels).backward()
        found.append(
            [
                losses.classification.detach(),
                losses.pixels.detach(),
                model.blocks[0].attention.qkv.weight.grad,
            ]
        )
    assert model.pattern.density == 1
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=0)


def test_tiles_see_those_around_them_in_both_directions() -> None:
    # 32 pixels a tile, 4 high and 8 wide; side 32: 8 rows of 4 tiles.
    assert tile_of(32) == (4, 8)
    assert tile_of(64) == (8, 8)
    order = tile_order(32, 32)
    assert order[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 32]
    assert sorted(order.tolist()) == list(range(32 * 32))
    near = near_tiles(32, 32, local=1, globals=0)
    # 8 pixels each way: two tiles up and down, one to the left and to the right.
    assert near[13].nonzero().flatten().tolist() == [
        row * 4 + column for row in range(1, 6) for column in range(3)
    ]
    assert near_tiles(32, 32, local=0, globals=1).sum(dim=1).tolist() == [32] + 31 * [2]


def test_axial_scores_depend_on_the_distance_in_rows_and_columns_alone() -> None:
    rotate = AxialRotaryPositions(16, side=10)
    q, k = torch.randn(
        2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def score(first: tuple[int, int], second: tuple[int, int]) -> torch.Tensor:
        places = [torch.tensor([[row * 10 + column]]) for row, column in (first, second)]
        return (rotate(q, places[0]) * rotate(k, places[1])).sum()

    expected = score((1, 2), (4, 3))
    torch.testing.assert_close(score((3, 7), (6, 8)), expected)
    assert not torch.allclose(score((1, 2), (3, 4)), expected)


def test_axial_positions_mean_the_same_in_a_larger_image() -> None:
    x = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    small, large = AxialRotaryPositions(16, side=8), AxialRotaryPositions(16, side=32)
    torch.testing.assert_close(
        small(x, torch.tensor([[3 * 8 + 5]])), large(x, torch.tensor([[3 * 32 + 5]]))
    )


def test_grey_levels_are_read_as_their_normalised_value() -> None:
    embedding = build(PIXELS).embedding
    levels = torch.tensor([[0, 255]], dtype=torch.uint8)
    expected = torch.stack((embedding.bias - embedding.weight, embedding.bias + embedding.weight))
    torch.testing.assert_close(embedding(levels)[0], expected)


def test_masked_pixels_are_hidden_and_predicted_from_the_others() -> None:
    model = build(PIXELS)
    given, labels = pixels(), torch.tensor([0, 1, 0])
    masked = pixels_to_mask(3, 64, 0.5, torch.Generator().manual_seed(0))
    assert masked.shape == (3, 32)
    assert all(len(set(row)) == 32 for row in masked.tolist())
    # Another level at a masked place changes the target and not what the model sees.
    hides = torch.zeros(3, 64, dtype=torch.bool).scatter(1, masked, True)
    other = torch.where(hides, 255 - given, given)
    torch.testing.assert_close(model.hidden(given, masked=hides), model.hidden(other, masked=hides))
    found = model.losses(given, labels, None, masked)
    logits = model.pixel_head(model.hidden(given, masked=hides))[hides]
    expected = torch.nn.functional.cross_entropy(logits, given[hides].long() // 16)
    torch.testing.assert_close(found.pixels, expected)
    torch.testing.assert_close(found.classification, model.losses(given, labels).classification)


def test_without_copies_the_labels_are_predicted_from_the_masked_images() -> None:
    model, labels = build(PIXELS), torch.tensor([0, 1, 0])
    masked = pixels_to_mask(3, 64, 0.5, torch.Generator().manual_seed(0))
    whole = model.losses(pixels(), labels, None, masked)
    hidden = model.losses(pixels(), labels, None, masked, copies=False)
    torch.testing.assert_close(whole.pixels, hidden.pixels)
    assert not torch.allclose(whole.classification, hidden.classification)


def test_of_padded_rows_only_what_is_real_is_masked() -> None:
    lengths = torch.tensor([40, 1, 17, 33])
    masked = pixels_to_mask(4, 40, 0.3, torch.Generator().manual_seed(0), lengths)
    assert masked.shape == (4, 12)
    for row, length in zip(masked.tolist(), lengths.tolist(), strict=True):
        places = [place for place in row if place >= 0]
        assert len(set(places)) == len(places) == max(1, round(0.3 * length))
        assert max(places) < length


@pytest.mark.parametrize("copies", [True, False])
def test_masked_tokens_are_hidden_and_predicted_from_the_others_whatever_the_padding(
    copies,
) -> None:
    model = build(PREDICTED)
    given, labels, lengths = tokens(), torch.tensor([0, 1, 0, 2]), torch.tensor([40, 3, 17, 33])
    masked = pixels_to_mask(4, 40, 0.3, torch.Generator().manual_seed(0), lengths)
    hides = torch.zeros(4, 41, dtype=torch.bool).scatter(
        1, torch.where(masked < 0, 40, masked), True
    )[:, :40]
    found = model.losses(given, labels, lengths, masked, copies=copies)
    logits = model.pixel_head(model.hidden(given, lengths, hides))[hides]
    torch.testing.assert_close(
        found.pixels, torch.nn.functional.cross_entropy(logits, given[hides])
    )
    elsewhere = torch.where(torch.arange(40) < lengths[:, None], given, 3)
    again = model.losses(elsewhere, labels, lengths, masked, copies=copies)
    torch.testing.assert_close(again.pixels, found.pixels)
    if copies:
        torch.testing.assert_close(
            found.classification, model.losses(given, labels, lengths).classification
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [TOKENS, PREDICTED, PIXELS], ids=["tokens", "masked tokens", "pixels"]
)
def test_the_losses_are_one_graph(config) -> None:
    model = build(config, "sdpa")
    given = pixels() if config is PIXELS else tokens()
    labels = torch.zeros(len(given), dtype=torch.int64)
    lengths = None if config is PIXELS else torch.full((len(given),), 7)
    few = None if lengths is None else lengths[:2]
    generator = torch.Generator().manual_seed(0)
    masked = None if config is TOKENS else pixels_to_mask(2, given.shape[1], 0.5, generator, few)
    compiled = torch.compile(model.losses, fullgraph=True, backend="aot_eager")
    expected = model.losses(given, labels, lengths, masked)
    torch.testing.assert_close(compiled(given, labels, lengths, masked), expected)


def test_weights_are_carried_to_a_larger_image() -> None:
    small = build(PIXELS)
    large = build(replace(PIXELS, length=256, side=16, grey_bins=0), seed=1)
    carry_weights(large, small.config, small.state_dict())
    assert torch.equal(large.head[0].weight, small.head[0].weight)
    assert large(pixels(side=16)).shape == (3, 2)


def test_learned_positions_tell_tokens_apart_and_are_carried_to_the_same_length() -> None:
    learned = replace(PIXELS, positions="learned", pooling="mean")
    model, images = build(learned), pixels()
    assert not torch.allclose(model(images.flip(1)), model(images))
    carried = build(replace(learned, dropout=0.1), seed=1).eval()
    carry_weights(carried, model.config, model.state_dict())
    torch.testing.assert_close(carried(images), model(images))
    with pytest.raises(UserError, match="length=64"):
        carry_weights(
            build(replace(learned, length=256, side=16)), model.config, model.state_dict()
        )
    with torch.no_grad():
        model.position_embedding.weight.zero_()  # nothing else knows an order
    torch.testing.assert_close(model(images.flip(1)), model(images))


def test_layers_that_are_added_change_nothing_until_they_learn() -> None:
    shallow, deep = build(PIXELS), build(replace(PIXELS, layers=5), seed=1)
    carry_weights(deep, shallow.config, shallow.state_dict())
    torch.testing.assert_close(deep(pixels()), shallow(pixels()))
    F.cross_entropy(deep(pixels()), torch.tensor([0, 1, 0])).backward()
    assert all(projection.weight.grad.any() for projection in deep.blocks[4].residual_projections())
    with pytest.raises(UserError, match="layers=5"):
        carry_weights(shallow, deep.config, deep.state_dict())


def test_a_row_of_some_pixels_is_read_by_where_they_are() -> None:
    """All pixels in any order give the same answer, and with some of them the others
    might as well not exist."""
    model, images = build(PIXELS), pixels()
    order = torch.stack([torch.randperm(64) for _ in images])
    loss = model.losses(images, torch.tensor([0, 1, 1]))
    again = model.losses(images.gather(1, order), torch.tensor([0, 1, 1]), positions=order)
    torch.testing.assert_close(again.classification, loss.classification)
    few = order[:, :20]
    states = model.hidden(images.gather(1, few), positions=few)
    assert states.shape == (3, 20, PIXELS.embed)
    assert not torch.allclose(states, model.hidden(images)[:, :20])


def test_pixels_that_are_not_dark_are_read_first_and_dark_ones_by_chance() -> None:
    levels = torch.full((50, 64), 8, dtype=torch.uint8)
    levels[:, [3, 17, 40]] = torch.tensor([9, 255, 10], dtype=torch.uint8)
    found = pixels_to_read(levels, 10, torch.Generator().manual_seed(0))
    assert found.shape == (50, 10)
    assert (found[:, 1:] > found[:, :-1]).all()
    assert all({3, 17, 40} <= set(row) for row in found.tolist())
    assert len({tuple(row) for row in found.tolist()}) == 50
    assert set(pixels_to_read(levels, 2, torch.Generator().manual_seed(0)).flatten().tolist()) == {
        3,
        17,
        40,
    }


def test_pathx_has_under_a_million_parameters_and_the_cost_that_its_note_says() -> None:
    with torch.device("meta"):
        model = Classifier(ClassifierConfig(classes=2, length=128 * 128, side=128, grey_bins=256))
    assert 700_000 < model.parameter_count() < 1_000_000
    assert model.flops_per_sample() == pytest.approx(1.73e12, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "axial", "side": None}, "square images"),
        ({"inputs": "colour"}, "unknown inputs"),
        ({"classes": 1}, "classes=1"),
        ({"grey_bins": 100}, "power of two"),
        ({"positions": "sinusoidal"}, "unknown positions"),
        ({"pattern": "diagonal"}, "unknown attention pattern"),
        ({"pattern": "tiles", "positions": "rotary", "side": None}, "square images"),
        ({"inputs": "tokens"}, "grey_bins=16 for masked tokens"),
    ],
)
def test_a_shape_that_cannot_be_is_one_line(changes, message) -> None:
    with pytest.raises(UserError, match=message):
        replace(PIXELS, **changes)


def test_padding_under_a_block_pattern_is_refused() -> None:
    model = build(replace(TOKENS, length=32, pattern="butterfly", pattern_block=16))
    with pytest.raises(UserError, match="pattern=dense"):
        model(tokens(length=32), torch.tensor([32, 1, 2, 3]))


def on_a_gpu(
    config: ClassifierConfig, attention: str, exact: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The pixels' loss, and the gradients of the first layer's weights of q, k and v: compiled, in
    bfloat16 by autocast, or `exact` in float64."""
    torch.manual_seed(0)
    model = Classifier(config, attention).cuda()
    loss = model.double().losses if exact else torch.compile(model.losses, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=not exact):
        losses = loss(
            pixels(4, 64).cuda(),
            torch.tensor([0, 1, 0, 1]).cuda(),
            None,
            pixels_to_mask(2, 4096, 0.5, torch.Generator("cuda").manual_seed(0)),
        )
    (losses.classification + losses.pixels).backward()
    return losses.pixels.detach(), list(model.blocks[0].attention.qkv.weight.grad.double().chunk(3))


@pytest.mark.longest
@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["dense", "butterfly-local-global", "tiles"])
def test_on_a_gpu_our_kernels_are_as_exact_as_standard_attention(pattern) -> None:
    """Gradients: at most twice standard attention's error against float64, and one rounding of
    the largest value more.

    With mean pooling: which token max pooling hands a gradient to turns on the rounding
    of nearly equal states, so that with it any two computations in bfloat16 differ by far
    more than their rounding.
    """
    config = ClassifierConfig(
        classes=2,
        length=4096,
        side=64,
        grey_bins=256,
        pooling="mean",
        pattern=pattern,
        pattern_local=4,
    )
    _, exact = on_a_gpu(config, "standard", exact=True)
    loss, ours = on_a_gpu(config, "flash")
    standard_loss, theirs = on_a_gpu(config, "standard")
    torch.testing.assert_close(loss, standard_loss, rtol=5e-3, atol=0)
    for got, other, wanted in zip(ours, theirs, exact, strict=True):
        bound = (
            2 * (other - wanted).abs().max() + torch.finfo(torch.bfloat16).eps * wanted.abs().max()
        )
        assert (got - wanted).abs().max() <= bound
