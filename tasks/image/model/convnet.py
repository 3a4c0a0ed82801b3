"""Small image classifiers, as flat lists of layers that can be cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gpipe import layers


def conv_net(
    widths: Sequence[Sequence[int]],
    classes: int,
    *,
    dense_units: int,
    dropout: float,
    momentum: float = 0.9,
) -> list[layers.Layer.Params]:
    """Return the layers of a plain convolutional classifier.

    image: [B, H, W, C] → logits [B, classes]. Every convolution is 3 × 3 without bias, followed by
    batch norm and ReLU; every stage ends in a max pool that halves height and width.

    Args:
        widths: filters of each convolution, stage by stage.
        classes: number of classes.
        dense_units: features of the one hidden dense layer.
        dropout: rate before each of the two dense layers.
        momentum: momentum of the moving statistics of batch norms.
    """
    flat: list[layers.Layer.Params] = []
    for stage, filters_of_stage in enumerate(widths, 1):
        for number, filters in enumerate(filters_of_stage, 1):
            name = f"stage_{stage}_{number}"
            flat += [
                layers.Conv2D.Params(
                    name=f"{name}_conv", filters=filters, use_bias=False, kernel_init="he_normal"
                ),
                layers.BatchNorm.Params(name=f"{name}_norm", momentum=momentum),
                layers.Activation.Params(name=f"{name}_relu", activation="relu"),
            ]
        flat.append(layers.MaxPool2D.Params(name=f"stage_{stage}_pool"))
    flat += [layers.Flatten.Params(name="flatten"), *_head([dense_units], classes, dropout)]
    return _reading_images(flat)


def mlp(units: Sequence[int], classes: int, *, dropout: float) -> list[layers.Layer.Params]:
    """Return the layers of a dense classifier.

    image: [B, H, W, C] → logits [B, classes].

    Args:
        units: features of each hidden layer.
        classes: number of classes.
        dropout: rate before each dense layer except the first.
    """
    first = layers.Dense.Params(name="dense_1", units=units[0], activation="relu")
    rest = _head(units[1:], classes, dropout, first=2)
    return _reading_images([layers.Flatten.Params(name="flatten"), first, *rest])


def _head(
    units: Sequence[int], classes: int, dropout: float, first: int = 1
) -> list[layers.Layer.Params]:
    flat: list[layers.Layer.Params] = []
    for number, features in enumerate(units, first):
        flat += [
            layers.Dropout.Params(name=f"dropout_{number}", rate=dropout),
            layers.Dense.Params(name=f"dense_{number}", units=features, activation="relu"),
        ]
    return [
        *flat,
        layers.Dropout.Params(name="dropout_head", rate=dropout),
        layers.Softmax.Params(name="head", classes=classes),
    ]


def _reading_images(flat: list[layers.Layer.Params]) -> list[layers.Layer.Params]:
    flat[0].reads = ("image",)
    return flat
