"""Makes `digits.npz` from the digits that scikit-learn ships: `python data/make_digits.py` (needs scikit-learn)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).with_name("digits.npz")


def main() -> None:
    digits = load_digits()
    images = digits.images.astype(np.uint8)  # whole numbers 0..16
    if not np.array_equal(images, digits.images):
        raise ValueError("the images of scikit-learn's digits are no longer whole numbers")
    np.savez_compressed(TARGET, images=images, labels=digits.target.astype(np.uint8))
    print(f"{TARGET.name}: {len(images)} images, SHA-256 of images+labels:")
    print(hashlib.sha256(images.tobytes() + digits.target.astype(np.uint8).tobytes()).hexdigest())


if __name__ == "__main__":
    main()
