"""AmoebaNet's layers as rows for the law tests, like `layer_cases` for the core layers."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gpipe.tasks.image.model import amoebanet, heads, operations
from tests.cases.layer_cases import IMAGE, Case

LABEL = tf.TensorSpec((4,), tf.int32)
LARGER = tf.TensorSpec((4, 13, 12, 5))
DROP = operations.DropPath.Params(keep=0.6)


def _operation(name: str, operation: str, stride: int = 1, filters: int = 8) -> Case:
    own = operations.Operation.Params(operation=operation, filters=filters, stride=stride)
    return Case(name, own, (IMAGE,))


CASES = (
    Case("drop_path", operations.DropPath.Params(keep=0.5), (tf.TensorSpec((16, 2, 3)),)),
    Case("factorized", operations.FactorizedReduction.Params(filters=6), (IMAGE,)),
    Case("fit_sides", operations.Fit.Params(filters=6), (LARGER, IMAGE)),
    Case("fit_channels", operations.Fit.Params(filters=6), (IMAGE, IMAGE)),
    Case("fit_nothing", operations.Fit.Params(filters=4), (IMAGE, IMAGE)),
    _operation("operation_none", "none", filters=4),
    _operation("operation_pool", "avg_pool_3x3", stride=2),
    _operation("operation_separable", "separable_5x5_2", stride=2),
    _operation("operation_crossed", "1x7_7x1", stride=2),
    Case("whole_conv", operations.WholeConv2D.Params(filters=3), (IMAGE,)),
    Case("stem", amoebanet.Stem.Params(filters=5), (IMAGE,)),
    Case("stem_small", amoebanet.Stem.Params(kind="small", filters=5), (IMAGE,)),
    Case(
        "amoeba_cell",
        amoebanet.AmoebaCell.Params(
            genotype="D",
            filters=8,
            drop_path=DROP,
            auxiliary=heads.AuxiliaryHead.Params(classes=3),
            reads=("x", "previous", "label"),
        ),
        (IMAGE, LARGER, LABEL),
    ),
    Case(
        "amoeba_cell_first",
        amoebanet.AmoebaCell.Params(genotype="D", reduction=True, filters=6, reads=("x",)),
        (IMAGE,),
    ),
    Case("auxiliary_head", heads.AuxiliaryHead.Params(classes=3), (IMAGE, LABEL)),
    Case("classifier", heads.Classifier.Params(classes=3, top_k=2), (IMAGE, LABEL)),
)
