"""A small convolutional network with linear layers on flattened feature maps."""

from torch import Tensor, nn


class CNN(nn.Module):
    """A network of two 3 x 3 convolutions with stride two and ReLU, followed by two linear layers on all positions.

    Each channel of the second convolution corresponds to a block of columns in the linear layer after flattening. A
    block has one column for each position of the feature map after pooling. The height and width of the images must be
    multiples of four.
    """

    def __init__(
        self, channels: tuple[int, int], hidden: int, classes: int, *, image: int, in_channels: int = 1
    ) -> None:
        super().__init__()
        if image % 4:
            raise ValueError(f"both convolutions halve the images, so their size must be a multiple of 4, not {image}")
        first, second = channels
        self.conv1 = nn.Conv2d(in_channels, first, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(first, second, 3, stride=2, padding=1)
        self.hidden = nn.Linear(second * (image // 4) ** 2, hidden)
        self.output = nn.Linear(hidden, classes)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.conv1(x))
        x = self.activation(self.conv2(x))
        x = self.activation(self.hidden(x.flatten(1)))
        return self.output(x)
