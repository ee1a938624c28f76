"""What is in every image, whatever its side: curves of dashes that stay apart, and two marked tips."""

from __future__ import annotations

import numpy as np
import pytest
from image_sets import ImagesOf

from flashtrain.errors import UserError
from flashtrain_recipes.arena.pathfinder.generate import generate_records
from flashtrain_recipes.arena.pathfinder.parameters import of_side
from flashtrain_recipes.arena.pathfinder.records import GENERATOR_VERSIONS, Header
from flashtrain_recipes.arena.pathfinder.store import PathfinderImages

pytestmark = pytest.mark.slow  # numba compiles the walks

SETS = [(32, "hard", 300), (64, "easy", 100), (128, "hard", 60), (256, "hard", 200), (48, "easy", 60)]


@pytest.fixture(scope="module", params=SETS, ids=lambda chosen: f"{chosen[0]}-{chosen[1]}")
def images(request: pytest.FixtureRequest, images_of: ImagesOf) -> PathfinderImages:
    return images_of(*request.param)


PINNED = {
    "smooth": (1, 60, 0, [[68, 72], [58, 67], [51, 59]], [33496, 39237, 41906]),
    "original": (2, 60, 1, [[42, 83], [56, 87], [65, 87]], [22, 381, 381]),
}


def dashes_of(images: PathfinderImages, image: int) -> np.ndarray:
    """(n, 2, 2) float64: tail and head of each dash."""
    strokes = images.strokes([image])
    return strokes.segments[0, : int(strokes.count[0])].double().numpy().reshape(-1, 2, 2)


def test_every_dash_has_its_length_and_lies_within_the_frame(images: PathfinderImages) -> None:
    parameters = images.parameters
    low, high = parameters.padding - 0.5, parameters.side - parameters.padding - 0.5
    for image in range(len(images)):
        dashes = dashes_of(images, image)
        assert np.linalg.norm(dashes[:, 1] - dashes[:, 0], axis=1) == pytest.approx(parameters.dash_length, abs=1e-3)
        assert dashes.min() >= low
        assert dashes.max() <= high


def test_an_image_has_its_two_curves_and_whole_distractors(images: PathfinderImages) -> None:
    parameters = images.parameters
    short = images.strokes(slice(None)).count.numpy() - 2 * parameters.contour_dashes
    assert short.min() >= 0
    assert short.max() <= parameters.distractors * parameters.distractor_dashes
    assert not (short % parameters.distractor_dashes).any()


def test_a_curve_goes_on_from_dash_to_dash_without_sharp_turns(images: PathfinderImages) -> None:
    parameters, margins = images.parameters, images.margins
    sharpest = np.pi / 2 / parameters.continuity
    for image in range(len(images)):
        dashes = dashes_of(images, image)
        along = (dashes[:, 1] - dashes[:, 0]) / parameters.dash_length
        for curve in range(2):
            own = slice(curve * parameters.contour_dashes, (curve + 1) * parameters.contour_dashes)
            heads, tails, way = dashes[own, 1], dashes[own, 0], along[own]
            turn = np.arccos(np.clip((way[1:] * way[:-1]).sum(1), -1, 1))
            assert turn.max() < sharpest
            gap = np.linalg.norm(tails[1:] - heads[:-1], axis=1)
            assert gap.max() < 2 * margins[image] + 1.5
            assert gap.min() > 0.5


def test_dashes_that_do_not_follow_one_another_keep_their_margins(images: PathfinderImages) -> None:
    parameters, margins = images.parameters, images.margins
    long, short = parameters.contour_dashes, parameters.distractor_dashes
    for image in range(0, len(images), 4):
        dashes = dashes_of(images, image)
        number = np.arange(len(dashes))
        curve = np.where(number < 2 * long, number // long, 2 + (number - 2 * long) // short)
        apart = segment_distances(dashes)
        follows = (curve[:, None] == curve[None]) & (np.abs(number[:, None] - number[None]) <= 1)
        follows[0, long] = follows[long, 0] = True  # the two first dashes are only as far apart as their tails
        # Twice half a thickness and the margin, less the rims of two pixels, which may overlap.
        assert apart[~follows].min() > parameters.thickness + 2 * margins[image] - 1.75


def test_the_discs_sit_on_a_first_and_a_last_tip(images: PathfinderImages) -> None:
    strokes, long = images.strokes(slice(None)), images.parameters.contour_dashes
    segments, markers = strokes.segments.numpy(), strokes.markers.numpy()
    first_tips = segments[:, [0, long], :2]
    last_tips = segments[:, [long - 1, 2 * long - 1], 2:]
    starts = np.abs(first_tips - markers[:, :1]).max(-1).argmin(1)
    ends = np.abs(last_tips - markers[:, 1:]).max(-1).argmin(1)
    assert np.abs(first_tips - markers[:, :1]).max(-1).min(1).max() == 0
    assert np.abs(last_tips - markers[:, 1:]).max(-1).min(1).max() == 0
    assert np.array_equal(starts == ends, strokes.labels.numpy() == 1)
    assert np.array_equal(images.labels, strokes.labels.numpy())


def test_the_first_tips_are_as_far_apart_as_seed_distance(images: PathfinderImages) -> None:
    parameters = images.parameters
    segments = images.strokes(slice(None)).segments.numpy()
    apart = np.linalg.norm(segments[:, 0, :2] - segments[:, parameters.contour_dashes, :2], axis=1)
    assert np.abs(apart - parameters.seed_distance).max() < 2.2  # three roundings to whole pixels


def test_half_of_the_labels_are_one(images_of: ImagesOf) -> None:
    labels = images_of(32, "hard", 6000).labels
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / len(labels) ** 0.5


def test_both_margins_of_path_x_occur(images_of: ImagesOf) -> None:
    assert set(images_of(128, "hard", 60).margins.tolist()) == {2, 3}


def test_an_image_depends_on_its_number_and_not_on_what_was_made_before() -> None:
    header = Header(of_side(32), 3, "train")
    together = generate_records(header, 0, 40)
    apart = np.concatenate([generate_records(header, first, count) for first, count in ((37, 3), (0, 11), (11, 26))])
    assert np.array_equal(np.roll(apart, -3), together)


def test_seeds_splits_and_sides_have_images_of_their_own() -> None:
    headers = [Header(of_side(32), 3, "train"), Header(of_side(32), 4, "train"), Header(of_side(32), 3, "test")]
    made = [generate_records(header, 0, 50)["heads"] for header in headers]
    everything = {image.tobytes() for heads in made for image in heads}
    assert len(everything) == 150


@pytest.mark.parametrize("drawing", PINNED)
def test_these_are_the_images_of_the_generators_version(drawing: str) -> None:
    """A change of the generator that changes images must raise its GENERATOR_VERSIONS, and this test with it."""
    record = generate_records(Header(of_side(128), 0, "train", drawing), 1, 1)[0]
    found = record["count"], record["label"], record["heads"][:3].tolist(), record["angles"][:3].tolist()
    assert (GENERATOR_VERSIONS[drawing], *found) == PINNED[drawing]


def test_curves_that_cannot_fit_are_said_in_a_line() -> None:
    straight = of_side(32, continuity=50.0)
    with pytest.raises(UserError, match="no two curves of 14 dashes fit an image of side 32"):
        generate_records(Header(straight, 0, "train"), 0, 100)


def segment_distances(segments: np.ndarray) -> np.ndarray:
    """(n, n) distances between segments (n, 2, 2) that do not cross, 0 where they do."""
    tails, heads = segments[:, 0], segments[:, 1]
    along = heads - tails

    def to_segments(points: np.ndarray) -> np.ndarray:
        share = ((points[:, None] - tails) * along).sum(-1) / (along * along).sum(-1)
        nearest = tails + share.clip(0, 1)[..., None] * along
        return np.linalg.norm(points[:, None] - nearest, axis=-1)

    found = np.minimum(to_segments(tails), to_segments(heads))
    found = np.minimum(found, found.T)

    def side_of(points: np.ndarray) -> np.ndarray:
        away = points[None] - tails[:, None]
        return along[:, None, 0] * away[..., 1] - along[:, None, 1] * away[..., 0]

    astride = side_of(tails) * side_of(heads) < 0
    found[astride & astride.T] = 0
    return found
