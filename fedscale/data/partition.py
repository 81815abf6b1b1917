"""x"""
from __future__ import annotations
import numpy as np
from numpy.typing import NDArray
from fedscale import seeds
def balanced(labels: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    """Return sorted indices of a balanced subset: size // K of each of the K classes.

    They are the first of each class after a shuffle of its own that depends on nothing but
    the class (seed 0), so a smaller subset lies inside a larger one. A class with fewer images
    gives all it has.
    """
    classes = np.unique(labels)
    chosen = []
    for number, label in enumerate(classes):
        mine = np.flatnonzero(labels == label)
        seeds.stream(0, "images", client=number).shuffle(mine)
        chosen.append(mine[: size // len(classes)])
    return np.sort(np.concatenate(chosen))
