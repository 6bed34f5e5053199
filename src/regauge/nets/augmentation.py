"""Random changes of images that preserve the class of each image."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Augmentation:
    """A random change of images: shift each image by whole pixels along both axes, and mirror half of the images.

    Pixels that are shifted out of an image are lost, and pixels that are shifted in are zero. A shift is equivalent to
    a random crop of a padded image.

    Attributes:
        shift: The largest number of pixels by which an image is shifted up, down, left or right.
        mirrors: Whether an image is mirrored horizontally with probability one half.
    """

    shift: int = 4
    mirrors: bool = True

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise ValueError(f"shift is {self.shift}, but images cannot be shifted by fewer than 0 pixels")

    def __str__(self) -> str:
        return f"shifted by up to {self.shift} pixel(s)" + (" and mirrored" if self.mirrors else "")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Change each image of a batch independently.

        Args:
            images: A batch of images, `[n, channels, height, width]`.
            generator: The random generator of shifts and mirrors.

        Returns:
            The changed images in channels-last memory layout, in which convolutions are faster.

        Raises:
            ValueError: The tensor is not a batch of images.
        """
        if images.ndim != 4:
            raise ValueError(f"images are [n, channels, height, width], but a tensor {list(images.shape)} was given")
        count, _, height, width = images.shape
        drawn = torch.randint(2 * self.shift + 1, (2, count, 1), generator=generator, device=generator.device)
        rows, columns = (
            start.to(images.device) + torch.arange(size, device=images.device)
            for start, size in zip(drawn, (height, width), strict=True)
        )
        if self.mirrors:
            mirrored = torch.rand(count, 1, generator=generator, device=generator.device) < 0.5
            columns = torch.where(mirrored.to(images.device), columns.flip(1), columns)
        padded = torch.nn.functional.pad(images, [self.shift] * 4)
        each = torch.arange(count, device=images.device)
        picked = padded[each[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
