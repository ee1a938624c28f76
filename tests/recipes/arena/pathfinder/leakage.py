"""How much of the label simple figures of an image give away: logistic regression on summary features."""

from __future__ import annotations

import numpy as np
import torch

from flashtrain_recipes.arena.pathfinder.raster import rasterise
from flashtrain_recipes.arena.pathfinder.store import PathfinderImages


def summary_features(images: PathfinderImages) -> np.ndarray:
    """(B, F) float64: brightness and lit pixels, dashes, what the discs' places say, lengths of the long curves."""
    strokes = images.strokes(slice(None))
    side = images.parameters.side
    drawn = rasterise(strokes, images.parameters)
    markers, segments = strokes.markers.double(), strokes.segments.double()
    apart = (markers[:, 0] - markers[:, 1]).norm(dim=-1)
    from_centre = (markers - (side - 1) / 2).norm(dim=-1)
    dashes = images.parameters.contour_dashes
    middles = (segments[..., :2] + segments[..., 2:]) / 2
    real = torch.arange(segments.shape[1]) < strokes.count[:, None]
    steps = [
        (middles[:, first + 1 : first + dashes] - middles[:, first : first + dashes - 1]).norm(dim=-1).sum(-1)
        for first in (0, dashes)
    ]
    near = [((middles - marker[:, None]).norm(dim=-1) < 10) & real for marker in markers.unbind(1)]
    middle = markers.mean(dim=1)
    between = ((middles - middle[:, None]).norm(dim=-1) < apart[:, None] / 2) & real
    told = [
        drawn.double().mean(dim=(1, 2)),
        (drawn > 0).double().mean(dim=(1, 2)),
        (drawn == 255).double().sum(dim=(1, 2)),
        drawn.double().std(dim=(1, 2)),
        strokes.count.double(),
        apart,
        (markers[:, 0] - markers[:, 1]).abs().amin(-1),
        from_centre.amin(-1),
        from_centre.amax(-1),
        torch.stack(steps).amin(0),
        torch.stack(steps).sum(0),
        torch.stack([count.sum(-1) for count in near]).amin(0).double(),
        torch.stack([count.sum(-1) for count in near]).amax(0).double(),
        between.sum(-1).double(),
    ]
    return torch.stack(told, dim=1).numpy()


def held_out_accuracy(features: np.ndarray, labels: np.ndarray, train_share: float = 0.75) -> float:
    """Accuracy on the last images of a logistic regression on the first, with all products of two features."""
    cut = int(train_share * len(labels))
    features = (features - features[:cut].mean(0)) / (features[:cut].std(0) + 1e-9)
    first, second = np.triu_indices(features.shape[1])
    features = np.concatenate([features, features[:, first] * features[:, second]], axis=1)
    features = (features - features[:cut].mean(0)) / (features[:cut].std(0) + 1e-9)
    features = np.concatenate([np.ones((len(features), 1)), features.clip(-5, 5)], axis=1)
    seen, truth = features[:cut], labels[:cut].astype(float)
    weights = np.zeros(features.shape[1])
    for _ in range(12):  # Newton's method, with a little weight decay
        share = 1 / (1 + np.exp(-seen @ weights))
        slope = seen.T @ (share - truth) + 1.0 * weights
        curvature = (seen * (share * (1 - share))[:, None]).T @ seen + np.eye(len(weights))
        weights -= np.linalg.solve(curvature, slope)
    return float(((features[cut:] @ weights > 0) == (labels[cut:] == 1)).mean())
